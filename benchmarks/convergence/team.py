"""Workers of this machine that count as hosts, asked for one training at a time."""

from __future__ import annotations

import sys

from benchmarks.convergence.job import Job, Outcome
from benchmarks.step_time.members import Members, TeamError
from benchmarks.step_time.team import free_addresses

WORKERS = 2


class Team:
    """Two workers, so each compresses what it sends to the other.

    They are started when there is something to train, and again where one has failed.

    Args:
        timeout: seconds to wait for a training's end.
    """

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._members: Members | None = None

    def train(self, job: Job) -> Outcome:
        """Trains on all workers at once.

        Raises:
            TeamError: a worker failed or gave no answer, or not all have the same weights.
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
        """Ends the workers, if there are any."""
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
