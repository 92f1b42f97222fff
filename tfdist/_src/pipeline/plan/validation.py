"""Checks that a schedule is complete, respects all dependencies and cannot deadlock."""

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

from tfdist._src.pipeline.plan.lowering import lower, walk
from tfdist._src.pipeline.plan.schedule import Action, Edge, Edges, Kind, Schedule
from tfdist.errors import ScheduleError

_PARTS = (Kind.INPUT_GRADIENT, Kind.WEIGHT_GRADIENT)


def check(
    schedule: Schedule,
    edges: Iterable[Edge] | None = None,
    differentiable: Iterable[Edge] | None = None,
    capacity: int = 1,
) -> None:
    """Raises an error unless a schedule can train a model.

    A valid schedule meets these conditions:

    - All passes of a stage run on one rank.
    - Every microbatch passes through every stage exactly once forward and once backward. The
      backward pass is either whole (B), or split into I and W.
    - If a pass depends on another pass on the same rank, it comes after the other pass.
    - The forward passes of a stage are in the order of the microbatches.
    - The ranks cannot deadlock, even if a channel holds only `capacity` messages.

    Args:
        schedule: the schedule.
        edges: pairs `(source, target)` of stages, such that `target` consumes outputs of `source`.
            The target must come after the source, but not necessarily directly. By default, each
            stage feeds the next stage.
        differentiable: the edges over which the target sends gradients back to the source. By
            default, these are all edges.
        capacity: the number of messages that a channel holds before further sends block.

    Raises:
        ScheduleError: the schedule is invalid. The message names a rank, an action and the problem.
        ValueError: `edges` or `differentiable` is invalid; see `Edges`.

    Example:
        >>> check(Schedule("mine", ((Action(Kind.FORWARD, 0, 0),),)))
        Traceback (most recent call last):
        tfdist.errors.ScheduleError: Rank 0 never runs B0.0.
    """
    edges = None if edges is None else tuple(edges)
    differentiable = None if differentiable is None else tuple(differentiable)
    _check_numbers(schedule)
    _check_complete(schedule)
    _check_order(schedule, Edges(schedule.stages, edges, differentiable))
    for _ in walk(lower(schedule, edges, differentiable), capacity):
        pass


def peak_activations(schedule: Schedule, freed_by_input_gradient: float = 0) -> tuple[float, ...]:
    """Returns the largest number of activations that each rank keeps at the same time.

    Each forward pass of one microbatch through one stage adds one activation. The rank keeps the
    activation until the corresponding backward pass ends. If the backward pass is split, the rank
    keeps the activation until W ends.

    Args:
        schedule: a schedule that passes `check`.
        freed_by_input_gradient: the fraction of an activation, from 0 to 1, that the rank already
            frees when I ends.

    Returns:
        The number for each rank. With v stages per rank, an activation belongs to only one of them.
        So it takes about 1/v of the memory that a microbatch takes on all stages of the rank.

    Example:
        >>> peak_activations(make_schedule("1f1b", ranks=4, microbatches=8))
        (4, 3, 2, 1)
    """
    change = {
        Kind.FORWARD: 1,
        Kind.BACKWARD: -1,
        Kind.INPUT_GRADIENT: -freed_by_input_gradient,
        Kind.WEIGHT_GRADIENT: freed_by_input_gradient - 1,
    }
    return tuple(
        max(itertools.accumulate((change[a.kind] for a in actions), initial=0))
        for actions in schedule.actions
    )


def _check_numbers(schedule: Schedule) -> None:
    if not schedule.actions:
        raise ScheduleError("The schedule has no ranks.")
    holders: dict[int, tuple[int, Action]] = {}
    for rank, actions in enumerate(schedule.actions):
        if not actions:
            raise ScheduleError(f"Rank {rank} runs nothing; every rank needs a stage.")
        for action in actions:
            if action.stage < 0 or action.microbatch < 0:
                raise ScheduleError(
                    f"Rank {rank} runs {action}; stages and microbatches are numbered from 0."
                )
            holder, first = holders.setdefault(action.stage, (rank, action))
            if holder != rank:
                raise ScheduleError(
                    f"Rank {rank} runs {action} and rank {holder} runs {first}; a stage must be on "
                    f"one rank."
                )
    for stage in range(schedule.stages):
        if stage not in holders:
            raise ScheduleError(
                f"No rank runs stage {stage}; stages must be numbered without gaps, here from 0 "
                f"to {schedule.stages - 1}."
            )


def _check_complete(schedule: Schedule) -> None:
    for rank, actions in enumerate(schedule.actions):
        times = Counter(actions)
        for action, number in times.items():
            if number > 1:
                raise ScheduleError(f"Rank {rank} runs {action} {number} times.")
        for stage in schedule.stages_of(rank):
            for microbatch in range(schedule.microbatches):
                found = {k: a for k in Kind if (a := Action(k, stage, microbatch)) in times}
                _check_passes(rank, stage, microbatch, found)


def _check_passes(rank: int, stage: int, microbatch: int, found: Mapping[Kind, Action]) -> None:
    """Checks that one microbatch passes through one stage exactly once forward and backward."""
    parts = [found[kind] for kind in _PARTS if kind in found]
    if Kind.BACKWARD in found and parts:
        raise ScheduleError(
            f"Rank {rank} runs {found[Kind.BACKWARD]} and {parts[0]}; a backward pass is either "
            f"whole, B, or split into I and W."
        )
    for kind in (Kind.FORWARD, *(_PARTS if parts else (Kind.BACKWARD,))):
        if kind not in found:
            raise ScheduleError(f"Rank {rank} never runs {Action(kind, stage, microbatch)}.")


def _check_order(schedule: Schedule, edges: Edges) -> None:
    for rank, actions in enumerate(schedule.actions):
        position = {action: index for index, action in enumerate(actions)}
        for action in actions:
            for needed in _needs(action, edges):
                if position.get(needed, -1) > position[action]:
                    raise ScheduleError(
                        f"Rank {rank} runs {action} before {needed}, which must come first."
                    )


def _needs(action: Action, edges: Edges) -> Iterator[Action]:
    """Yields the actions that must precede a given action if they run on the same rank."""
    kind, stage, microbatch = action.kind, action.stage, action.microbatch
    if kind is Kind.FORWARD:
        if microbatch > 0:
            yield Action(kind, stage, microbatch - 1)
        for source in edges.sources(action):
            yield Action(kind, source, microbatch)
    elif kind is Kind.WEIGHT_GRADIENT:
        yield Action(Kind.INPUT_GRADIENT, stage, microbatch)
    else:
        yield Action(Kind.FORWARD, stage, microbatch)
        for source in edges.sources(action):
            yield Action(Kind.BACKWARD, source, microbatch)
            yield Action(Kind.INPUT_GRADIENT, source, microbatch)
