"""Processes that import TensorFlow once and then fork workers, because an import takes seconds."""

from __future__ import annotations

import contextlib
import gc
import importlib
import multiprocessing
import os
import select
import signal
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from typing import Any
from unittest import mock


class Child:
    """A process that a zygote has forked.

    Attributes:
        pipe: the connection to the process.
    """

    def __init__(self, zygote: Zygote, pid: int, pipe: Connection) -> None:
        self.pipe = pipe
        self._zygote = zygote
        self._pid = pid
        self._end = os.pidfd_open(pid)
        self._exitcode: int | None = None

    def exitcode(self, seconds: float) -> int | None:
        """Returns the exit code, or the negative signal; None if still running after `seconds`."""
        if self._exitcode is None and select.select([self._end], [], [], seconds)[0]:
            self._exitcode = self._zygote.bury(self._pid)
            os.close(self._end)
        return self._exitcode

    def wake(self) -> None:
        """Continues the process after a signal has stopped it."""
        signal.pidfd_send_signal(self._end, signal.SIGCONT)

    def kill(self) -> None:
        """Kills the process, stopped or not, and waits for its end."""
        self.pipe.close()
        if self._exitcode is None:
            signal.pidfd_send_signal(self._end, signal.SIGKILL)
            self.exitcode(60)


class Zygote:
    """Forks processes that have already imported TensorFlow, Keras and tfdist.

    Args:
        environment: environment variables that the imports read.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._pipe, theirs = multiprocessing.Pipe()
        process = multiprocessing.get_context("spawn").Process(
            target=_divide, args=(theirs,), daemon=True
        )
        # The process must have no other threads, because threads do not survive a fork.
        self._environment = {**environment, "OPENBLAS_NUM_THREADS": "1"}
        with mock.patch.dict(os.environ, self._environment):
            process.start()
        self._process = process
        theirs.close()

    def fork(
        self,
        environment: Mapping[str, str],
        function: Callable[..., None],
        *args: Any,
    ) -> Child:
        """Starts `function(pipe, *args)` in a new process with more environment variables."""
        ours, theirs = multiprocessing.Pipe()
        everything = {**os.environ, **self._environment, **environment}
        self._pipe.send((everything, function, args))
        send_handle(self._pipe, theirs.fileno(), self._process.pid)
        theirs.close()
        return Child(self, self._pipe.recv(), ours)

    def bury(self, pid: int) -> int:
        """Returns the exit code of a child that has ended."""
        self._pipe.send(pid)
        return self._pipe.recv()


def _divide(pipe: Connection) -> None:
    import numpy as np

    # Importing these modules does not change Keras; forked processes change it if necessary.
    for name in (
        "tensorflow",
        "keras",
        "tfdist._src.pipeline.model",
        "tfdist._src.strategy.multi_worker",
    ):
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # Otherwise, each rank's garbage collector would scan TensorFlow's objects.
    with contextlib.suppress(EOFError):
        while True:
            request = pipe.recv()
            if isinstance(request, int):
                pipe.send(os.waitstatus_to_exitcode(os.waitpid(request, 0)[1]))
                continue
            handle = recv_handle(pipe)
            if pid := os.fork():
                os.close(handle)
                pipe.send(pid)
                continue
            pipe.close()
            environment, function, args = request
            os.environ.clear()
            os.environ.update(environment)
            np.random.seed()  # new random numbers in each process, as without a fork
            function(Connection(handle), *args)
            return
