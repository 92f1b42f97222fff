"""The workers and hosts that an elastic job has lost, and the exit code that follows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tfdist.launch.job.failure import Doubt, Failure


@dataclass(frozen=True)
class Loss:
    """One failure of an elastic job.

    Attributes:
        failure: of a worker or a host.
        fate: what followed, as in `"replaced at once"`.
        final: whether the job went on without a replacement.
        late: whether another worker had completed the training before.
    """

    failure: Failure
    fate: str
    final: bool
    late: bool = False


def decisive(losses: Sequence[Loss], *, completed: bool, left: bool) -> Failure | None:
    """The failure that the job fails with; None if it has not failed.

    A worker that is lost on the way is no failure of the job if the others complete the training,
    or save their state on request. One that fails after another has completed the training is.

    Args:
        losses: in order.
        completed: whether at least one worker ended with 0.
        left: whether at least one ended with 75.
    """
    late = [loss.failure for loss in losses if loss.late]
    if late:
        return _first(late)
    if completed or left:
        return None
    return _first([loss.failure for loss in losses if loss.final])


def _first(failures: Sequence[Failure]) -> Failure | None:
    """The earliest that is not merely the consequence of another one, if there is one."""
    return min(failures, key=lambda failure: failure.doubt == Doubt.VICTIM, default=None)
