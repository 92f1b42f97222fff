"""A schedule: what each rank of a pipeline computes, and in which order."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass

from tfdist._src.pipeline.plan.action import Action, Kind


@dataclass(frozen=True)
class Schedule:
    """The actions of every rank, in the order in which the rank runs them.

    The actions determine which rank holds a stage. A schedule is plain data and may be invalid;
    `plan.validation.check` raises an error if it is.

    Attributes:
        name: its name in plots and messages.
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
        """The number of ranks in the pipeline."""
        return len(self.actions)

    @functools.cached_property
    def stages(self) -> int:
        """The number of stages on all ranks together."""
        return 1 + max((a.stage for actions in self.actions for a in actions), default=-1)

    @functools.cached_property
    def microbatches(self) -> int:
        """The number of microbatches."""
        return 1 + max((a.microbatch for actions in self.actions for a in actions), default=-1)

    @functools.cached_property
    def splits_backward(self) -> bool:
        """Whether any backward pass is split into I and W."""
        return any(a.kind is Kind.INPUT_GRADIENT for actions in self.actions for a in actions)

    def rank_of(self, stage: int) -> int:
        """The rank that holds a stage.

        Raises:
            KeyError: no rank runs any of its passes.
        """
        return self._placement[stage]

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages that a rank holds, in ascending order."""
        return tuple(sorted(s for s, holder in self._placement.items() if holder == rank))

    def forward_only(self) -> Schedule:
        """The same schedule without backward passes, as evaluation and prediction run it."""
        return Schedule(
            self.name,
            tuple(tuple(a for a in actions if a.kind is Kind.FORWARD) for actions in self.actions),
        )

    def forward_first(self) -> Schedule:
        """A schedule of the same stages in which all forward passes precede the backward passes.

        Breadth-first: all microbatches pass through a stage before they pass through the next one.
        """

        def passes(rank: int) -> tuple[Action, ...]:
            mine, all_ = self.stages_of(rank), range(self.microbatches)
            forward = [Action(Kind.FORWARD, stage, m) for stage in mine for m in all_]
            backward = [Action(Kind.BACKWARD, stage, m) for stage in reversed(mine) for m in all_]
            return (*forward, *backward)

        return Schedule(self.name, tuple(passes(rank) for rank in range(self.ranks)))

    @functools.cached_property
    def _placement(self) -> Mapping[int, int]:
        return {a.stage: rank for rank, actions in enumerate(self.actions) for a in actions}
