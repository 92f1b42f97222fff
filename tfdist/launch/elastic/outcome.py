"""How an elastic job has ended."""

from __future__ import annotations

from dataclasses import dataclass

from tfdist.launch.hosts.worker_counts import WorkerCounts
from tfdist.launch.job.failure import Failure
from tfdist.launch.job.losses import Loss


@dataclass(frozen=True)
class ElasticOutcome:
    """How an elastic job has ended, as this host knows it.

    Attributes:
        code: the exit code.
        losses: what was lost, in order.
        job: what has become of the workers.
        stopped: why it was stopped, if it was.
    """

    code: int
    losses: tuple[Loss, ...]
    job: WorkerCounts
    stopped: Failure | None = None
