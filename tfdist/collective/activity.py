"""What this process's training has waited for and run, as the native core counts it."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass, field

from tfdist import native
from tfdist.native.api import Activity as Counters

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
"""The kinds of collectives and messages, in the core's order."""

_NANOSECONDS = 1e-9


@dataclass(frozen=True)
class Activity:
    """Counts since the process started.

    Times are in seconds, and include no time in which the step went on beside its collectives.

    Attributes:
        steps: steps of training, evaluation and prediction that have got their input.
        rows: rows of their input, on this worker.
        input: waiting for the next batch.
        workers: waiting for other workers to join a collective or to send a message.
        network: waiting for the data of a collective or a message to move.
        operations: the collectives and messages that have ended well, by kind.
    """

    steps: int = 0
    rows: int = 0
    input: float = 0.0
    workers: float = 0.0
    network: float = 0.0
    operations: Mapping[str, int] = field(default_factory=dict)


def read() -> Activity | None:
    """The counts so far; None if the native core does not run here, so that nothing is counted."""
    if not native.has_ops():
        return None
    counters = Counters()
    native.load().library.tfd_get_activity(ctypes.byref(counters))
    return Activity(
        counters.steps,
        counters.rows,
        _NANOSECONDS * counters.input_ns,
        _NANOSECONDS * counters.workers_ns,
        _NANOSECONDS * counters.network_ns,
        dict(zip(KINDS, counters.operations, strict=True)),
    )
