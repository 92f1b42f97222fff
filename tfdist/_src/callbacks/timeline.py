"""A callback that writes a timeline of all workers' activity during some training steps."""

import contextlib
import dataclasses
import gzip
import json
import os
import socket
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tfdist._src import native
from tfdist._src.callbacks.step_count import StepCount
from tfdist._src.callbacks.straggler_monitor import MeasuredSteps
from tfdist._src.cluster.session.session import MAX_BYTES
from tfdist._src.group import Group
from tfdist._src.keras.fit.callback import Callback
from tfdist._src.log import logger
from tfdist._src.monitoring.chrome_trace import OpProfile, Span, WorkerRecord, build, clock_offsets
from tfdist._src.monitoring.stragglers import USUAL_FACTOR, Measurement, describe, find
from tfdist._src.pipeline.model import PipelineModel
from tfdist._src.snapshots.part_file import write_atomically
from tfdist._src.strategy.extended import extended_if_ours
from tfdist._version import __version__

_RECORDS = 1024  # the number of records that each communicator keeps
_TICKS_PER_SECOND = 1_000_000_000


class Timeline(Callback):
    """Writes a trace of some training steps on all workers, for Perfetto or `chrome://tracing`.

    Each worker is a process in the trace. The lanes of a worker show its steps, the actions of its
    pipeline, its waiting times (for input, for other workers, and for the network), its collectives
    (waiting for the last worker, moving data, and the parts of hierarchical collectives),
    compression, and the optimizer's updates. An arrow leads from each send to its receive. Messages
    between the workers show how much the clocks of their hosts differ. `otherData.clocks` in the
    file contains the clock offset of each worker and the uncertainty of this offset. Workers on the
    same host have the same clock. `otherData.straggler` names the worker that keeps the others
    waiting in these steps, and the cause, as `StragglerMonitor` does. It is null if no worker keeps
    the others waiting.

    While steps are recorded, each worker keeps its activities (spans) in memory. After the last
    recorded step, all workers send their spans to the chief, which writes the file. In other steps,
    the callback costs nothing. Each communicator records only its last 1,024 collectives and
    messages, so choose few steps. In a `PipelineModel`, the step is retraced before the first and
    after the last recorded step.

    Args:
        path: the path of the file, which the chief writes. It ends with `.json`, or with `.json.gz`
            for a compressed file.
        steps: the first step to record, and the step after the last recorded step. Steps are
            counted from 0 over all epochs.
        profiler: whether to run `tf.profiler` in these steps on all workers. It adds TensorFlow's
            own operations to the file, with a lane for each thread and for each stream of a GPU.
            The recorded steps then take longer.

    Raises:
        ValueError: `steps` is not a range of steps.
        NativeUnavailableError: in training, if the native core cannot be compiled or loaded.
        ProgramMismatchError: in training, if not all workers have this callback.

    Example:
        ```python
        model.fit(dataset, callbacks=[tfdist.callbacks.Timeline("trace.json.gz", (100, 110))])
        ```
    """

    same_on_all_workers = True

    def __init__(
        self,
        path: str | os.PathLike[str],
        steps: tuple[int, int] = (100, 110),
        *,
        profiler: bool = False,
    ) -> None:
        super().__init__()
        first, last = steps
        if not (isinstance(first, int) and isinstance(last, int) and 0 <= first < last):
            raise ValueError(
                "`steps` must be the first step and the one after the last, 0 <= first < last. "
                f"Received: {steps!r}. Pass a pair such as (100, 110)."
            )
        self._path = Path(os.fspath(path))
        self._profile = OpProfile() if profiler else None
        self._first, self._end = first, last
        self._count = StepCount()
        self._steps: MeasuredSteps | None = None  # measures the recorded steps
        self._since: int | None = None  # the time at which recording began
        self._written = False
        self._actions: Callable[[], list[tuple[str, float, float]]] | None = None
        self._timed = contextlib.ExitStack()

    def __repr__(self) -> str:
        return f"Timeline(steps=({self._first}, {self._end}))"

    def on_train_begin(self, logs: Any = None) -> None:
        native.load_ops()
        self._count, self._steps = StepCount(), None
        self._since, self._written = None, False

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        if self._steps is not None:
            self._steps.timer.begin_epoch()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._count.end_epoch()

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self._count.begin_batch(batch)
        if self._written:
            return
        if self._actions is None and self._count.begun >= self._first - 1:
            self._time_actions()
        if self._since is None and self._count.begun >= self._first:
            if self._profile is not None:
                self._profile.start()
            self._core.tfd_record_spans(1)
            self._since = self._core.tfd_clock()
            self._steps = MeasuredSteps(self.model)
        if self._steps is not None:
            self._steps.timer.begin_batch()
        self._step_begun = self._core.tfd_clock()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._count.end_batch(batch)
        if self._since is None or self._written:
            return
        first, last = self._count.begun, self._count.done - 1
        name = f"step {first}" if last == first else f"steps {first} to {last}"
        self._add("step", name, self._step_begun, self._core.tfd_clock())
        self._add_actions()
        if self._steps is not None:
            self._steps.timer.end_batch(batch)
        if self._count.done >= self._end:
            self._finish()

    def on_train_end(self, logs: Any = None) -> None:
        if self._since is not None and not self._written:
            self._finish()
        elif not self._written and self._is_chief:
            logger.warning(
                f"no timeline: training ended after {self._count.done} steps, before step "
                f"{self._first}. Choose earlier `steps`."
            )

    def state_dict(self) -> dict[str, Any]:
        return {**self._count.state_dict(), "written": self._written}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._count.load_state_dict(state)
        self._written = bool(state["written"])

    @property
    def _core(self) -> Any:
        return native.load().library

    @property
    def _group(self) -> Group | None:
        extended = extended_if_ours(self.model.distribute_strategy)
        return None if extended is None else extended.group

    @property
    def _is_chief(self) -> bool:
        return self._group is None or self._group.topology.is_chief

    def _clocks(self) -> tuple[int, int]:
        """Returns the steady clock and the Unix time at the same moment, in nanoseconds."""
        # The thread may be suspended between two readings, so the readings that are closest
        # together are used.
        readings = [
            (self._core.tfd_clock(), time.time_ns(), self._core.tfd_clock()) for _ in range(5)
        ]
        before, unix, after = min(readings, key=lambda reading: reading[2] - reading[0])
        return (before + after) // 2, unix

    def _time_actions(self) -> None:
        if isinstance(self.model, PipelineModel):
            self._actions = self._timed.enter_context(self.model.recording_actions())

    def _add(self, lane: str, name: str, begin: int, end: int) -> None:
        self._core.tfd_add_span(lane.encode(), name.encode(), begin, end)

    def _add_actions(self) -> None:
        if self._actions is None:
            return
        steady, unix = self._clocks()
        for name, start, end in self._actions():
            begin, stop = (steady + round(t * _TICKS_PER_SECOND) - unix for t in (start, end))
            self._add("pipeline", name, begin, stop)

    def _finish(self) -> None:
        """Sends this worker's record to the chief, which writes the file."""
        self._written = True
        steady, unix = self._clocks()
        measured = None if self._steps is None else self._steps.measure()
        record = {
            "measured": None if measured is None else dataclasses.astuple(measured),
            "host": socket.gethostname(),
            "clock": [steady, unix],
            "ops": [] if self._profile is None else self._profile.stop(steady - unix),
            "communicators": json.loads(self._core.tfd_state(_RECORDS, self._since)),
            "spans": json.loads(self._core.tfd_spans()),
        }
        self._core.tfd_record_spans(0)
        self._timed.close()
        self._actions = self._steps = None
        group = self._group
        records = [record] if group is None else _gather(group, record)
        if self._is_chief:
            self._write(records)

    def _write(self, records: list[dict[str, Any]]) -> None:
        group = self._group
        workers = [] if group is None else group.topology.workers
        offsets = clock_offsets(records)
        straggler = self._straggler(records)
        trace = build(
            [
                WorkerRecord(
                    rank,
                    str(workers[rank]) if workers else "this process",
                    record["host"],
                    *offsets[rank],
                    [Span(*span) for span in record["spans"]],
                    record["communicators"],
                    [Span(*op) for op in record["ops"]],
                )
                for rank, record in enumerate(records)
            ],
            {
                "tfdist": __version__,
                "steps": [self._first, self._count.done],
                "straggler": straggler,
            },
        )
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            text = json.dumps(trace).encode()
            data = gzip.compress(text, 6) if self._path.suffix == ".gz" else text
            write_atomically(self._path, lambda file: file.write(data))
        except OSError as error:
            logger.error(
                f"the timeline {self._path} could not be written: {error}. Choose another path."
            )
            return
        logger.info(
            f"the timeline of steps {self._first} to {self._count.done - 1} is in "
            f"{self._path}; open it in https://ui.perfetto.dev"
        )
        if straggler is not None:
            logger.warning(straggler)

    def _straggler(self, records: list[dict[str, Any]]) -> str | None:
        """Describes the worker that kept the others waiting in these steps, and the cause."""
        group, communicator = self._group, MeasuredSteps(self.model).communicator
        measured = [record["measured"] for record in records]
        if group is None or communicator is None or None in measured:
            return None
        straggler = find(
            [Measurement.of(one) for one in measured], USUAL_FACTOR, communicator.hosts
        )
        if straggler is None:
            return None
        workers = group.topology.workers
        return describe(straggler, lambda rank: f"{workers[rank]} on host {records[rank]['host']}")


def _encode(record: dict[str, Any]) -> bytes:
    return zlib.compress(json.dumps(record).encode(), 1)


def _gather(group: Group, record: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the records of all workers on the chief, and an empty list on other workers."""
    if group.topology.size == 1:
        return [record]
    payload = _encode(record)
    for part, called in ("ops", "operations of TensorFlow"), ("spans", "spans"):
        if record[part] and len(payload) > MAX_BYTES // group.topology.size:
            logger.warning(
                f"{len(record[part])} {called} are missing from the timeline of this worker: there "
                "are too many to send. Choose fewer `steps`."
            )
            record = {**record, part: []}
            payload = _encode(record)
    received: list[bytes] = []

    def keep(payloads: list[bytes]) -> list[bytes]:
        received.extend(payloads)
        return [b""] * len(payloads)

    group.session.coordinate("timeline", payload, keep)
    return [json.loads(zlib.decompress(one)) for one in received]
