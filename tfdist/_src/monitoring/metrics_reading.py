"""Reads the state and the counts of this process, without any metrics package."""

import socket
from dataclasses import dataclass

from tfdist._src.cluster.this_worker import topology
from tfdist._src.comm import tracing
from tfdist._src.comm.communicator_interface import Traffic
from tfdist._src.comm.functions import statistics
from tfdist._src.comm.tracing import Activity
from tfdist._src.monitoring.training import Trained, record


@dataclass(frozen=True)
class MetricsReading:
    """The state of this process, and counts since the process started.

    Attributes:
        rank: its rank in the job.
        workers: the number of workers in the job.
        host: the name of its host.
        strategy: the class of its strategy.
        trained: the training steps that the process has completed, and the rows of these steps.
        activity: the waiting times and other counts of the native core; None if the core does not
            run.
        sent_bytes: the bytes that the native core has sent to other hosts; None if the core does
            not run, or has stopped.
        device_bytes: the bytes of tensors in collectives of this process's GPUs that did not pass
            through the memory of a host; None in the same cases as `sent_bytes`.
        recoveries: the number of times that training has continued after the loss of a worker.
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
    """Records the class of this process's strategy, and the value of `TFDIST_HOST`."""
    global _strategy, _host
    _strategy, _host = strategy, host


def read_metrics() -> MetricsReading:
    """Returns the state now; may be called from any thread."""
    job, waited = topology(), tracing.read()
    traffic = None if waited is None else _traffic()
    return MetricsReading(
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
    except RuntimeError:  # The process is ending and has left its groups.
        return None
