"""A schedule: what each rank of the pipeline computes, in which order."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass

from tfdist.pipeline.plan.action import Action, Kind


@dataclass(frozen=True)
class Schedule:
    """The actions of every rank, each list in the order in which its rank runs it.

    Which rank holds a stage follows from the actions. A schedule is plain data and may be wrong;
    `tfdist.pipeline.plan.validation.check` says so.

    Attributes:
        name: what it is called in pictures and messages.
        actions: for each rank, its actions.

    Example:
        >>> schedule = make_schedule("1f1b", ranks=2, microbatches=2)
        >>> [str(action) for action in schedule.actions[0]]
        ['F0.0', 'F0.1', 'B0.0', 'B0.1']
        >>> schedule.rank_of(1)
        1
    """

    name: str
    actions: tuple[tuple[Action, ...], ...]

    @property
    def ranks(self) -> int:
        """The number of processes of the pipeline."""
        return len(self.actions)

    @functools.cached_property
    def stages(self) -> int:
        """The number of stages of all ranks together."""
        return 1 + max((a.stage for own in self.actions for a in own), default=-1)

    @functools.cached_property
    def microbatches(self) -> int:
        """The number of microbatches."""
        return 1 + max((a.microbatch for own in self.actions for a in own), default=-1)

    @functools.cached_property
    def splits_backward(self) -> bool:
        """Whether any backward pass is in two parts, I and W."""
        return any(a.kind is Kind.INPUT_GRADIENT for own in self.actions for a in own)

    def rank_of(self, stage: int) -> int:
        """The rank that holds a stage.

        Raises:
            KeyError: no rank runs anything of it.
        """
        return self._placement[stage]

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages that a rank holds, in ascending order."""
        return tuple(sorted(s for s, holder in self._placement.items() if holder == rank))

    def forward_only(self) -> Schedule:
        """The same schedule without backward passes, as evaluation and prediction run it."""
        return Schedule(
            self.name,
            tuple(tuple(a for a in own if a.kind is Kind.FORWARD) for own in self.actions),
        )

    @functools.cached_property
    def _placement(self) -> Mapping[int, int]:
        return {a.stage: rank for rank, own in enumerate(self.actions) for a in own}
