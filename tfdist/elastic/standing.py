"""What the workers of a new group agree on: which step stands, and who takes whose state."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass

from tfdist.errors import GroupLostError


@dataclass(frozen=True)
class Standing:
    """Where a worker is in its call of `fit`, between two steps.

    Attributes:
        is_new: whether it has just joined, and knows nothing.
        is_torn: whether its state is that after no step.
        steps: how many steps of training stand on it.
        epochs_ended: of how many epochs all of its callbacks have seen the end.
        seen: how many of its callbacks have seen the end of the last batch.
    """

    is_new: bool = False
    is_torn: bool = False
    steps: int = 0
    epochs_ended: int = 0
    seen: int = 0

    def to_json(self) -> str:
        """The standing as a text for the other workers."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Standing:
        """The standing that another worker has sent."""
        return cls(**json.loads(text))


@dataclass(frozen=True)
class Agreement:
    """How the workers go on.

    Attributes:
        steps: how many steps of training stand.
        source: the rank whose state the others take.
        takers: the ranks that take it.
        newcomers: those of them that have just joined.
        epoch: the epoch that all of them enter.
        seen: how many callbacks have seen the end of the last batch on any worker.
    """

    steps: int
    source: int
    takers: frozenset[int]
    newcomers: frozenset[int]
    epoch: int
    seen: int


def agree(standings: Sequence[Standing]) -> Agreement:
    """Decides how the workers go on, the same on all of them.

    A step that stands on any worker has received all it needed from all, so it stands for all. No
    worker enters a later epoch than one whose callbacks have not seen the end of the one before.

    Args:
        standings: those of all workers, in rank order.

    Raises:
        GroupLostError: no worker has a whole state.

    Example:
        >>> agree([Standing(steps=7), Standing(steps=8), Standing(is_new=True)]).takers
        frozenset({0, 2})
    """
    whole = {r: s for r, s in enumerate(standings) if not s.is_new and not s.is_torn}
    if not whole:
        raise GroupLostError(
            "No worker that is left has the state of the training: what had it is lost. Start the "
            "job again, with tfdist.callbacks.BackupAndRestore to go on from a snapshot."
        )
    steps = max(standing.steps for standing in whole.values())
    newest = [rank for rank, standing in whole.items() if standing.steps == steps]
    members = [standing for standing in standings if not standing.is_new]
    return Agreement(
        steps=steps,
        source=newest[0],
        takers=frozenset(range(len(standings))) - set(newest),
        newcomers=frozenset(rank for rank, standing in enumerate(standings) if standing.is_new),
        epoch=min(standing.epochs_ended for standing in members),
        seen=max(whole[rank].seen for rank in newest),
    )
