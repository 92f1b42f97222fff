"""Schedules that users write as plain lists."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tfdist.errors import ScheduleError
from tfdist.pipeline.plan.action import Action, Kind
from tfdist.pipeline.plan.schedule import Schedule


def from_lists(name: str, lists: Iterable[Iterable[Any]]) -> Schedule:
    """Makes a schedule of plain lists.

    Args:
        name: of the schedule.
        lists: for each rank, what it runs: `Action`s, or tuples (kind, stage, microbatch) with a
            `Kind` or its letter.

    Raises:
        ScheduleError: something is neither.

    Example:
        >>> schedule = from_lists("mine", [[("F", 0, 0), ("B", 0, 0)]])
        >>> [str(action) for action in schedule.actions[0]]
        ['F0.0', 'B0.0']
    """
    try:
        actions = [list(own) for own in lists]
    except TypeError:
        raise ScheduleError(
            f"A schedule is a list of actions for each rank. Received: {lists!r}."
        ) from None
    return Schedule(
        name, tuple(tuple(_action(rank, a) for a in own) for rank, own in enumerate(actions))
    )


def _action(rank: int, given: Any) -> Action:
    if isinstance(given, Action):
        return given
    try:
        kind, stage, microbatch = given
        action = Action(Kind(kind), stage, microbatch)
    except (TypeError, ValueError):
        action = None
    if action is None or not isinstance(stage, int) or not isinstance(microbatch, int):
        raise ScheduleError(
            f"An action is an `Action` or a tuple (kind, stage, microbatch) with a kind of F, B, I "
            f"and W and two whole numbers. Received: {given!r} on rank {rank}."
        )
    return action
