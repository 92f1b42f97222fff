"""Custom schedules, written as plain lists."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tfdist._src.pipeline.plan.schedule import Action, Kind, Schedule
from tfdist.errors import ScheduleError


def from_lists(name: str, lists: Iterable[Iterable[Any]]) -> Schedule:
    """Makes a schedule from plain lists.

    Args:
        name: the schedule's name.
        lists: for each rank, the actions that it runs: `Action`s, or tuples
            (kind, stage, microbatch) with a `Kind` or its letter.

    Raises:
        ScheduleError: an item is neither.

    Example:
        >>> schedule = from_lists("mine", [[("F", 0, 0), ("B", 0, 0)]])
        >>> [str(action) for action in schedule.actions[0]]
        ['F0.0', 'B0.0']
    """
    try:
        actions = [list(items) for items in lists]
    except TypeError:
        raise ScheduleError(
            f"A schedule must be a list of actions for each rank. Received: {lists!r}."
        ) from None
    return Schedule(
        name, tuple(tuple(_action(rank, i) for i in items) for rank, items in enumerate(actions))
    )


def _action(rank: int, item: Any) -> Action:
    if isinstance(item, Action):
        return item
    try:
        kind, stage, microbatch = item
        action = Action(Kind(kind), stage, microbatch)
    except (TypeError, ValueError):
        action = None
    if action is None or not isinstance(stage, int) or not isinstance(microbatch, int):
        raise ScheduleError(
            f"An action must be an `Action` or a tuple (kind, stage, microbatch) of F, B, I or W "
            f"and two integers. Received: {item!r} on rank {rank}."
        )
    return action
