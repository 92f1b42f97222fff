"""What this process's training has waited for and run, as the native core counts it."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass, field

from tfdist._src import native
from tfdist._src.native.api import Activity as Counters

KINDS = (
    "all_reduce",
    "reduce_scatter",
    "all_gather",
    "broadcast",
    "all_to_all",
    "barrier",
    "send",
    "receive",
)
"""The kinds of collectives and messages."""

_NANOSECONDS = 1e-9


@dataclass(frozen=True)
class Activity:
    """Counts since the process started.

    Times are in seconds, and include no time in which the step went on beside its collectives.

    Attributes:
        steps: steps of training, evaluation and prediction that have got their input.
        input: waiting for batches that have come.
        workers: waiting for other workers to join a collective or to send a message.
        network: waiting for the data of a collective or a message to move.
        operations: the collectives and messages that have ended well, by kind.
        bus_bytes: of them, the bytes of all values times the share that each link must carry at
            least, as nccl-tests compute bus bandwidth.
        bus_time: how long they took once all workers had joined.
        input_since: when the wait for the next batch began that still lasts, by
            `time.monotonic()`; None for none.
    """

    steps: int = 0
    input: float = 0.0
    workers: float = 0.0
    network: float = 0.0
    operations: Mapping[str, int] = field(default_factory=dict)
    bus_bytes: float = 0.0
    bus_time: float = 0.0
    input_since: float | None = None

    def since(self, earlier: Activity) -> Activity:
        """The counts between an earlier moment and this one."""
        return Activity(
            self.steps - earlier.steps,
            self.input - earlier.input,
            self.workers - earlier.workers,
            self.network - earlier.network,
            {kind: n - earlier.operations.get(kind, 0) for kind, n in self.operations.items()},
            self.bus_bytes - earlier.bus_bytes,
            self.bus_time - earlier.bus_time,
            self.input_since,
        )


def read() -> Activity | None:
    """The counts so far; None if the native core does not run here, so that nothing is counted."""
    if not native.has_ops():
        return None
    counters = Counters()
    native.load().library.tfd_get_activity(ctypes.byref(counters))
    return Activity(
        counters.steps,
        _NANOSECONDS * counters.input_ns,
        _NANOSECONDS * counters.workers_ns,
        _NANOSECONDS * counters.network_ns,
        {kind: getattr(counters, kind) for kind in KINDS},
        counters.bus_bytes,
        _NANOSECONDS * counters.bus_ns,
        _NANOSECONDS * counters.input_since_ns or None,
    )
