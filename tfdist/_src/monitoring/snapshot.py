"""Everything that the metrics of this process tell, at one moment."""

from __future__ import annotations

import socket
from dataclasses import dataclass

from tfdist._src.cluster.this_worker import topology
from tfdist._src.comm import activity
from tfdist._src.comm.activity import Activity
from tfdist._src.comm.functions import statistics
from tfdist._src.comm.traffic import Traffic
from tfdist._src.monitoring.training import Trained, record


@dataclass(frozen=True)
class Snapshot:
    """The state of this process, and its counts since it started.

    Attributes:
        rank: its rank in the job.
        workers: the number of workers in the job.
        host: the name of its host.
        strategy: the class of its strategy.
        trained: its steps and their rows.
        activity: what they have waited for; None if the native core does not run.
        sent_bytes: sent to other hosts by the native core; None if it does not run, or no longer.
        device_bytes: of the tensors in its GPUs' collectives that did not pass through the hosts'
            memory; None as for `sent_bytes`.
        recoveries: how often training has gone on after the loss of a worker.
    """

    rank: int
    workers: int
    host: str
    strategy: str
    trained: Trained
    activity: Activity | None = None
    sent_bytes: int | None = None
    device_bytes: int | None = None
    recoveries: int = 0


_strategy = ""
_host = ""


def describe(strategy: str, host: str) -> None:
    """Records the class of the strategy that this process has made, and its host if it is set."""
    global _strategy, _host
    _strategy, _host = strategy, host


def take() -> Snapshot:
    """The state now; from any thread."""
    job, waited = topology(), activity.read()
    traffic = None if waited is None else _traffic()
    return Snapshot(
        rank=job.rank,
        workers=job.size,
        host=_host or socket.gethostname(),
        strategy=_strategy,
        trained=record.read(),
        activity=waited,
        sent_bytes=None if traffic is None else traffic.sent_bytes,
        device_bytes=None if traffic is None else traffic.device_bytes,
        recoveries=record.recoveries,
    )


def _traffic() -> Traffic | None:
    try:
        return statistics()
    except RuntimeError:  # The process is about to end and has left its groups.
        return None
