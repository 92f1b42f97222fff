"""Schedules: the actions of each rank of a pipeline, and their order."""

from __future__ import annotations

import enum
import functools
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

# Stages exchange two kinds of values: outputs ("activation"), which pass to later stages, and
# their gradients ("gradient"), which pass back to earlier stages.
ValueKind: TypeAlias = Literal["activation", "gradient"]

# All values that a stage receives from other stages for one pass of a microbatch: the kind of the
# values, the receiving stage and the microbatch.
StageInput: TypeAlias = tuple[ValueKind, int, int]


class Kind(enum.Enum):
    """The kinds of passes of a microbatch through a stage.

    A backward pass is either whole (B, `BACKWARD`) or split into two parts. The first part (I,
    `INPUT_GRADIENT`) computes the gradients of the stage's inputs, for which earlier stages wait.
    The second part (W, `WEIGHT_GRADIENT`) computes the gradients of the weights. It can run later,
    since no other stage waits for it.
    """

    FORWARD = "F"
    BACKWARD = "B"
    INPUT_GRADIENT = "I"
    WEIGHT_GRADIENT = "W"

    @property
    def carries(self) -> ValueKind | None:
        """The kind of values that the pass exchanges with other stages; None for W."""
        return _VALUE_KINDS.get(self)

    # Each member exists only once, so it can be hashed by identity. This is faster than the hash
    # of `Enum`, which runs Python code.
    __hash__ = object.__hash__


_VALUE_KINDS: dict[Kind, ValueKind] = {
    Kind.FORWARD: "activation",
    Kind.BACKWARD: "gradient",
    Kind.INPUT_GRADIENT: "gradient",
}


@dataclass(frozen=True)
class Action:
    """One pass of one microbatch through one stage.

    Attributes:
        kind: the kind of the pass.
        stage: the stage's index. Stage 0 is the first stage of the model.
        microbatch: the microbatch's index, from 0.

    Example:
        >>> str(Action(Kind.FORWARD, stage=3, microbatch=5))
        'F3.5'
    """

    kind: Kind
    stage: int
    microbatch: int

    @functools.cached_property
    def takes(self) -> StageInput | None:
        """Identifies all values that the action receives from other stages; None for W."""
        value_kind = self.kind.carries
        return None if value_kind is None else (value_kind, self.stage, self.microbatch)

    def __str__(self) -> str:
        return f"{self.kind.value}{self.stage}.{self.microbatch}"


@dataclass(frozen=True)
class Costs:
    """The duration in seconds of each pass of a microbatch, and of each transfer.

    The cost of a pass is either one number or a sequence. One number is the total cost on a rank,
    which is divided among the rank's stages: with two stages per rank, each stage costs half of
    it. So the same costs can be used for schedules with one or several stages per rank. A sequence
    contains the cost of each stage.

    Attributes:
        forward: the duration of a forward pass (F).
        input_gradient: the duration of the first part of a backward pass (I).
        weight_gradient: the duration of the second part of a backward pass (W).
        backward: the duration of a whole backward pass (B); by default, the sum of both parts.
        transfer: the duration of a transfer between two ranks. It begins when the message has been
            sent and its receive has been posted, and ends when the message arrives.

    Example:
        >>> Costs(1.0, 1.0, 1.0).seconds(ranks=2, stages=4)[Kind.BACKWARD]
        (1.0, 1.0, 1.0, 1.0)
    """

    forward: float | Sequence[float] = 1.0
    input_gradient: float | Sequence[float] = 1.0
    weight_gradient: float | Sequence[float] = 1.0
    backward: float | Sequence[float] | None = None
    transfer: float = 0.0

    def seconds(self, ranks: int, stages: int) -> dict[Kind, tuple[float, ...]]:
        """Returns the duration of each kind of pass on each stage.

        Args:
            ranks: the number of ranks in the pipeline.
            stages: the total number of stages on all ranks.

        Returns:
            For each kind of pass, its duration in seconds on each stage.

        Raises:
            ValueError: a sequence does not have one entry for each stage, or a number is negative.
        """

        def each(name: str, cost: float | Sequence[float]) -> tuple[float, ...]:
            if isinstance(cost, Iterable):
                values = tuple(float(value) for value in cost)
            else:
                values = (float(cost) * ranks / stages,) * stages
            if len(values) != stages or not all(value >= 0 for value in values):
                raise ValueError(
                    f"`{name}` must be a number >= 0, or {stages} of them, one for each stage. "
                    f"Received: {cost}."
                )
            return values

        if not self.transfer >= 0:
            raise ValueError(f"`transfer` must be >= 0. Received: {self.transfer}.")
        inputs = each("input_gradient", self.input_gradient)
        weights = each("weight_gradient", self.weight_gradient)
        whole = tuple(i + w for i, w in zip(inputs, weights, strict=True))
        return {
            Kind.FORWARD: each("forward", self.forward),
            Kind.BACKWARD: whole if self.backward is None else each("backward", self.backward),
            Kind.INPUT_GRADIENT: inputs,
            Kind.WEIGHT_GRADIENT: weights,
        }


Edge: TypeAlias = tuple[int, int]


class Edges:
    """The edges between the stages of a model.

    Args:
        stages: the number of stages.
        edges: pairs `(source, target)` of stages, such that `target` consumes outputs of `source`.
            The target must come after the source, but not necessarily directly. By default, each
            stage feeds the next stage.
        differentiable: the edges over which the target sends gradients back to the source. By
            default, these are all edges.

    Raises:
        ValueError: an edge does not lead from an existing stage to a later existing stage, or
            `differentiable` contains a pair that is not in `edges`.
    """

    def __init__(
        self,
        stages: int,
        edges: Iterable[Edge] | None = None,
        differentiable: Iterable[Edge] | None = None,
    ) -> None:
        if edges is None:
            edges = [(stage, stage + 1) for stage in range(stages - 1)]
        forward = sorted({(source, target) for source, target in edges})
        backward = forward
        if differentiable is not None:
            backward = sorted({(source, target) for source, target in differentiable})
        for source, target in forward:
            if not 0 <= source < target < stages:
                raise ValueError(
                    f"An edge must go from one of the {stages} stages to a later one. Received: "
                    f"{(source, target)}. Number the stages in the order in which they run."
                )
        for edge in backward:
            if edge not in forward:
                raise ValueError(
                    f"A differentiable edge must be one of the edges. Received: {edge}. Add it to "
                    f"`edges`, or remove it from `differentiable`."
                )
        self._targets: dict[ValueKind, dict[int, list[int]]] = {
            "activation": defaultdict(list),
            "gradient": defaultdict(list),
        }
        self._sources: dict[ValueKind, dict[int, list[int]]] = {
            "activation": defaultdict(list),
            "gradient": defaultdict(list),
        }
        for source, target in forward:
            self._add("activation", source, target)
        for source, target in backward:
            self._add("gradient", target, source)

    def targets(self, action: Action) -> list[int]:
        """Returns the stages that consume an action's output."""
        value_kind = action.kind.carries
        return [] if value_kind is None else self._targets[value_kind].get(action.stage, [])

    def sources(self, action: Action) -> list[int]:
        """Returns the stages that produce the values that an action consumes."""
        value_kind = action.kind.carries
        return [] if value_kind is None else self._sources[value_kind].get(action.stage, [])

    def _add(self, value_kind: ValueKind, source: int, target: int) -> None:
        self._targets[value_kind][source].append(target)
        self._sources[value_kind][target].append(source)


@dataclass(frozen=True)
class Schedule:
    """The actions of every rank, in the order in which the rank runs them.

    A rank holds the stages of its actions. A schedule is plain data that is not checked when it is
    created. `plan.validation.check` raises an error if a schedule is invalid.

    Attributes:
        name: the name of the schedule in plots and messages.
        actions: for each rank, the rank's actions in order.

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
        """The total number of stages on all ranks."""
        return 1 + max((a.stage for actions in self.actions for a in actions), default=-1)

    @functools.cached_property
    def microbatches(self) -> int:
        """The number of microbatches."""
        return 1 + max((a.microbatch for actions in self.actions for a in actions), default=-1)

    @functools.cached_property
    def splits_backward(self) -> bool:
        """Whether the schedule splits any backward pass into I and W."""
        return any(a.kind is Kind.INPUT_GRADIENT for actions in self.actions for a in actions)

    def rank_of(self, stage: int) -> int:
        """Returns the rank that holds a stage.

        Raises:
            KeyError: no rank runs any pass of the stage.
        """
        return self._placement[stage]

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Returns the indices of the stages that a rank holds, in ascending order."""
        return tuple(sorted(s for s, holder in self._placement.items() if holder == rank))

    def forward_only(self) -> Schedule:
        """Returns the schedule without backward passes, for evaluation and prediction."""
        return Schedule(
            self.name,
            tuple(tuple(a for a in actions if a.kind is Kind.FORWARD) for actions in self.actions),
        )

    def forward_first(self) -> Schedule:
        """Returns a schedule that runs all forward passes before all backward passes.

        The ranks hold the same stages as before. On each rank, all microbatches pass through one
        stage before they pass through the rank's next stage.
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
