"""The workers of one host in an elastic job: who runs, who is replaced when, who is lost.

A state machine without processes and without a clock.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field

from tfdist.exit_codes import PREEMPTED
from tfdist.launch.elastic.replacements import GoOnWithout, Replace, decide_replacement
from tfdist.launch.hosts.worker_counts import WorkerCounts
from tfdist.launch.job.failure import Failure
from tfdist.launch.job.losses import Loss
from tfdist.launch.job.restarts import Ended


class State(enum.Enum):
    """What a worker does; those of `WorkerCounts`, and two more at the end."""

    MEMBER = "members"
    JOINING = "joining"
    WAITING = "waiting"
    COMPLETED = "completed"
    LEFT = "left"
    LOST = "lost"
    UNNEEDED = "unneeded"  # It never trained, or was given up, when the training was complete.
    STOPPED = "stopped"  # It ended after this command was told to stop.


@dataclass
class _Worker:
    state: State
    since: float
    due: float = 0.0
    history: list[Ended] = field(default_factory=list)


class WorkerStates:
    """Keeps the states of this host's workers.

    Args:
        ranks: theirs; all of them are about to start.
        limit: how many replacements each may have.
        now: the current time, in seconds of any clock.
        joining: whether they come to a job that runs already.

    Example:
        >>> states = WorkerStates([0, 1], limit=3, now=0.0)
        >>> states.ended(0, None, WorkerCounts(), now=9.0)
        >>> states.counts
        WorkerCounts(members=1, joining=0, waiting=0, completed=1, left=0, lost=0)
    """

    def __init__(
        self, ranks: Sequence[int], limit: int, now: float, *, joining: bool = False
    ) -> None:
        state = State.JOINING if joining else State.MEMBER
        self._workers = {rank: _Worker(state, now) for rank in ranks}
        self._limit = limit
        self._stopping = False

    @property
    def counts(self) -> WorkerCounts:
        """Their states, in numbers."""
        numbers = dict.fromkeys(WorkerCounts.__dataclass_fields__, 0)
        for worker in self._workers.values():
            if worker.state.value in numbers:
                numbers[worker.state.value] += 1
        return WorkerCounts(**numbers)

    def of(self, *states: State) -> list[int]:
        """The ranks that are in one of these states."""
        return [rank for rank, worker in self._workers.items() if worker.state in states]

    def trains(self, rank: int) -> None:
        """A replacement has completed a step: it has joined."""
        if self._workers[rank].state == State.JOINING:
            self._workers[rank].state = State.MEMBER

    def ended(
        self,
        rank: int,
        failure: Failure | None,
        job: WorkerCounts,
        now: float,
        *,
        alone: bool = False,
    ) -> Loss | None:
        """A worker has ended.

        Args:
            rank: its rank.
            failure: None if it ended with 0.
            job: the counts of all hosts before.
            now: the current time.
            alone: whether the other hosts of the job are gone for good.

        Returns:
            What was lost; None if it was not a failure.
        """
        worker = self._workers[rank]
        completed = bool(job.completed or self.counts.completed)
        if self._stopping:
            worker.state = State.STOPPED
        elif failure is None:
            worker.state = State.COMPLETED
        elif failure.status == PREEMPTED:
            worker.state = State.LEFT
        elif worker.state == State.UNNEEDED or (worker.state == State.JOINING and completed):
            worker.state = State.UNNEEDED
        else:
            return self._failed(rank, failure, completed, now, alone)
        return None

    def _failed(
        self, rank: int, failure: Failure, completed: bool, now: float, alone: bool
    ) -> Loss:
        worker = self._workers[rank]
        worker.history.append(Ended(failure, now - worker.since))
        decision = decide_replacement(worker.history, self._limit, completed=completed)
        if alone and self.of(State.MEMBER) in ([], [rank]):
            decision = GoOnWithout("host 0 is lost, and no worker is left that it could join")
        if isinstance(decision, GoOnWithout):
            worker.state = State.LOST
            fate = f"not replaced: {decision.reason}"
            return Loss(failure, fate, final=True, late=completed)
        worker.state = State.WAITING
        worker.due = now + decision.delay
        return Loss(failure, self._fate(decision), final=False)

    def _fate(self, decision: Replace) -> str:
        when = f"in {decision.delay:g} s" if decision.delay else "at once"
        return f"replaced {when} ({decision.number} of {self._limit})"

    def number(self, rank: int) -> int:
        """How often this worker has been replaced, the replacement that is due included."""
        return len(self._workers[rank].history)

    def due(self, now: float) -> list[int]:
        """Those whose replacement starts now; call `started` for each."""
        return [rank for rank in self.of(State.WAITING) if self._workers[rank].due <= now]

    @property
    def next_time(self) -> float | None:
        """When the next replacement is due."""
        return min((self._workers[rank].due for rank in self.of(State.WAITING)), default=None)

    def started(self, rank: int, now: float) -> None:
        """A replacement has started."""
        worker = self._workers[rank]
        worker.state, worker.since = State.JOINING, now

    def unavailable(self, rank: int, why: str) -> Loss:
        """A replacement could not be started."""
        worker = self._workers[rank]
        worker.state = State.LOST
        return Loss(worker.history[-1].failure, f"not replaced: {why}", final=True)

    def heed(self, job: WorkerCounts) -> list[int]:
        """Follows what has become of the job.

        Returns:
            Replacements to stop: the others have ended the training without them.
        """
        if job.completed or job.over:
            for rank in self.of(State.WAITING):
                self._workers[rank].state = State.UNNEEDED
        if not job.over:
            return []
        unneeded = self.of(State.JOINING)
        for rank in unneeded:
            self._workers[rank].state = State.UNNEEDED
        return unneeded

    def unneeded(self, rank: int) -> None:
        """A worker has no part in the training any more, which the others have completed."""
        self._workers[rank].state = State.UNNEEDED

    def given_up(self, rank: int) -> None:
        """A worker is still running after SIGKILL, and nobody waits for it any more."""
        self._workers[rank].state = State.STOPPED

    def stop(self) -> None:
        """This command was told to stop: nobody is replaced any more."""
        self._stopping = True
        for rank in self.of(State.WAITING):
            self._workers[rank].state = State.STOPPED
