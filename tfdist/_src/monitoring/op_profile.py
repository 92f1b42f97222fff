"""What TensorFlow's profiler sees of some steps, as spans of a timeline."""

from __future__ import annotations

import collections
import contextlib
import tempfile
from pathlib import Path
from typing import ClassVar

import tensorflow as tf
from google.protobuf.message import DecodeError

from tfdist._src.cluster.net.wait_messages import say
from tfdist._src.internals.profiler import read_threads
from tfdist._src.monitoring.chrome_trace import Span


class OpProfile:
    """Runs `tf.profiler`, of which a process has one, from `start` to `stop`.

    Where that fails, as while `keras.callbacks.TensorBoard(profile_batch=...)` uses the profiler, a
    line tells so, and there are no operations.
    """

    _running: ClassVar[OpProfile | None] = None

    def __init__(self) -> None:
        self._folder = ""
        self._undo = contextlib.ExitStack()

    def start(self) -> None:
        """Starts the profiler, again if a training that failed has left it running."""
        left = OpProfile._running
        if left is not None:
            OpProfile._running = None
            with left._undo, contextlib.suppress(tf.errors.OpError):
                tf.profiler.experimental.stop(save=False)
        # Python functions would cost much, and do not show what the steps of a graph do.
        options = tf.profiler.experimental.ProfilerOptions(
            host_tracer_level=2, python_tracer_level=0, device_tracer_level=1
        )
        try:
            with contextlib.ExitStack() as undo:
                folder = undo.enter_context(tempfile.TemporaryDirectory(prefix="tfdist-profile-"))
                tf.profiler.experimental.start(folder, options)
                self._folder, self._undo = folder, undo.pop_all()
                OpProfile._running = self
        except (tf.errors.OpError, OSError) as error:
            _complain(error)

    def stop(self, ahead: int) -> list[Span]:
        """Stops the profiler.

        Args:
            ahead: the clock of the spans minus the time since 1970, in nanoseconds.

        Returns:
            The operations that ran, with a lane for each thread, and for each stream of a GPU.
        """
        if OpProfile._running is not self:
            return []
        OpProfile._running = None
        folder = Path(self._folder)
        try:
            with self._undo:
                tf.profiler.experimental.stop()
                profiles = [path.read_bytes() for path in folder.rglob("*.xplane.pb")]
            threads = [thread for profile in profiles for thread in read_threads(profile)]
        except (tf.errors.OpError, OSError, DecodeError) as error:
            _complain(error)
            return []
        threads.sort(key=lambda thread: thread[1][0].begin)
        spans, numbers = [], collections.Counter[str]()
        for pool, ops in threads:
            numbers[pool] += 1
            lane = f"{pool} {numbers[pool]}"
            spans += [Span(lane, op.name, op.begin + ahead, op.end + ahead) for op in ops]
        return spans


def _complain(error: Exception) -> None:
    reason = (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
    say(
        "tfdist: TensorFlow's operations are missing from this worker's timeline, as its profiler "
        f"failed: {reason}. If TensorBoard uses it, pass profile_batch=0 there."
    )
