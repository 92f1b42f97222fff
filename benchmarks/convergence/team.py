"""Starts two workers on this machine, which run one training run at a time."""

from __future__ import annotations

import sys

from benchmarks.convergence.job import Job, Outcome
from benchmarks.step_time.members import Members, TeamError
from benchmarks.step_time.team import free_addresses

WORKERS = 2


class Team:
    """Two workers on this machine. tfdist treats them as workers on two hosts.

    So tfdist compresses the gradients that they send to each other. The workers are started for the
    first training run. After a failure, they are stopped, and started again for the next run.

    Args:
        timeout: the maximum time to wait for the end of a training run, in seconds.
    """

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._members: Members | None = None

    def train(self, job: Job) -> Outcome:
        """Runs a training run on both workers, and returns the outcome of the first worker.

        Raises:
            TeamError: a worker failed or did not answer, or the workers have different weights at
                the end.
        """
        self._members = self._members or self._start()
        try:
            first, *others = self._members.ask(job)
        except TeamError:
            self.stop()
            raise
        if any(other.weights != first.weights for other in others):
            raise TeamError("the workers' weights differ")
        outcome: Outcome = first
        return outcome

    def stop(self) -> None:
        """Stops the workers, if they are running."""
        if self._members is not None:
            self._members.stop()
        self._members = None

    def _start(self) -> Members:
        addresses = free_addresses(WORKERS)
        return Members(
            [[sys.executable, "-m", "benchmarks.convergence.worker"]] * WORKERS,
            [{"rank": rank, "addresses": addresses} for rank in range(WORKERS)],
            self._timeout,
        )
