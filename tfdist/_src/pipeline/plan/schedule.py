"""Schedules: the actions of each rank of a pipeline, and their order."""

from __future__ import annotations

import enum
import functools
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

# The kind of values between stages: outputs to later stages, or gradients to earlier ones.
ValueKind: TypeAlias = Literal["activation", "gradient"]

# A stage's input for a microbatch, from one or more other stages: (what, stage, microbatch).
StageInput: TypeAlias = tuple[ValueKind, int, int]


class Kind(enum.Enum):
    """The passes of a microbatch through a stage.

    A backward pass is either whole (`BACKWARD`) or split in two: `INPUT_GRADIENT`, which the
    previous stage waits for, and later `WEIGHT_GRADIENT`, which nothing waits for.
    """

    FORWARD = "F"
    BACKWARD = "B"
    INPUT_GRADIENT = "I"
    WEIGHT_GRADIENT = "W"

    @property
    def carries(self) -> ValueKind | None:
        """The kind of values that such a pass receives and sends; None for W."""
        return _VALUE_KINDS.get(self)

    # Members are singletons; the default hash runs Python code on every lookup.
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
        kind: the kind of pass.
        stage: the stage's index, from 0 at the model's inputs.
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
        """The action's input from other stages, if any; None for W."""
        value_kind = self.kind.carries
        return None if value_kind is None else (value_kind, self.stage, self.microbatch)

    def __str__(self) -> str:
        return f"{self.kind.value}{self.stage}.{self.microbatch}"


@dataclass(frozen=True)
class Costs:
    """The duration in seconds of each pass of a microbatch, and of each transfer.

    A single number covers all stages of a rank: with two stages per rank, each stage costs half of
    the number. So the same costs apply to schedules with and without virtual stages. A sequence
    lists the seconds of each stage.

    Attributes:
        forward: the seconds of a forward pass.
        input_gradient: the seconds of the first part of a backward pass.
        weight_gradient: the seconds of the second part of a backward pass.
        backward: the seconds of a whole backward pass; by default, the sum of both parts.
        transfer: the seconds from the time at which both ranks are ready for a message to its
            arrival.

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
        """Returns the seconds of each kind of pass, per stage.

        Args:
            ranks: the number of ranks in the pipeline.
            stages: the number of stages on all ranks together.

        Returns:
            For each kind, one number per stage.

        Raises:
            ValueError: a sequence has the wrong length, or a number is negative.
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
        edges: pairs (source stage, target stage), the source before the target but not
            necessarily adjacent; by default, each stage feeds the next.
        differentiable: the edges along which gradients flow back; by default, all.

    Raises:
        ValueError: an edge goes backward or to a stage that does not exist.
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
        """Returns the stages whose output an action consumes."""
        value_kind = action.kind.carries
        return [] if value_kind is None else self._sources[value_kind].get(action.stage, [])

    def _add(self, value_kind: ValueKind, source: int, target: int) -> None:
        self._targets[value_kind][source].append(target)
        self._sources[value_kind][target].append(source)


@dataclass(frozen=True)
class Schedule:
    """The actions of every rank, in execution order.

    The actions determine which rank holds a stage. A schedule is plain data and may be invalid;
    `plan.validation.check` raises an error if it is.

    Attributes:
        name: the schedule's name in plots and messages.
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
        """Returns the rank that holds a stage.

        Raises:
            KeyError: no rank runs any pass of the stage.
        """
        return self._placement[stage]

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Returns the stages that a rank holds, in ascending order."""
        return tuple(sorted(s for s, holder in self._placement.items() if holder == rank))

    def forward_only(self) -> Schedule:
        """Returns the schedule without backward passes, for evaluation and prediction."""
        return Schedule(
            self.name,
            tuple(tuple(a for a in actions if a.kind is Kind.FORWARD) for actions in self.actions),
        )

    def forward_first(self) -> Schedule:
        """Returns a schedule of the same stages that runs all forward passes first.

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
