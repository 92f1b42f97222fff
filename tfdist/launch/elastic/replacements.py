"""Whether a worker that has failed is replaced while the others go on: a pure decision."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tfdist.launch.job.restarts import End, Ended, back_off, decide, in_vain


@dataclass(frozen=True)
class Replace:
    """A replacement starts.

    Attributes:
        delay: seconds until then.
        number: which one of this worker's it is, from 1.
    """

    delay: float
    number: int


@dataclass(frozen=True)
class GoOnWithout:
    """The others go on without it.

    Attributes:
        reason: why, as a clause.
    """

    reason: str


def decide_replacement(
    history: Sequence[Ended], limit: int, *, completed: bool
) -> Replace | GoOnWithout:
    """Decides after a failure of a worker.

    What cannot help, and what has failed in the same way before, is the same as for a job that is
    started again (`job/restarts.py`), with the failures of this worker alone: those of the others
    are often the same failure at the same step, as of workers that have lost a peer.

    Args:
        history: the failures of this worker and of its replacements.
        limit: how many replacements it may have.
        completed: whether a worker of the job has already completed the training.
    """
    if completed:
        return GoOnWithout("the training is complete")
    decision = decide(history, limit)
    if isinstance(decision, End):
        return GoOnWithout(decision.reason or "--max-restarts is 0")
    count = in_vain(history)
    return Replace(back_off(count - 1) if count else 0.0, len(history))
