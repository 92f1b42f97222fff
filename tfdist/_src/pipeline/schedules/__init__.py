"""Makes built-in schedules by name, and schedules from custom functions."""

import inspect
from collections.abc import Callable, Iterable
from typing import Any

from tfdist._src.pipeline.plan.schedule import Action, Costs, Kind, Schedule
from tfdist._src.pipeline.plan.validation import check
from tfdist._src.pipeline.schedules.one_f_one_b import gpipe, interleaved, looped_bfs, one_f_one_b
from tfdist._src.pipeline.schedules.zero_bubble import dualpipev, interleaved_zb, zb_h1, zbv
from tfdist.errors import ScheduleError


def from_lists(name: str, lists: Iterable[Iterable[Any]]) -> Schedule:
    """Makes a schedule from plain lists.

    Args:
        name: the schedule's name.
        lists: for each rank, a list of its actions in order. Each item is an `Action` or a tuple
            `(kind, stage, microbatch)`. The `kind` in a tuple is a `Kind` or its letter: "F", "B",
            "I" or "W".

    Raises:
        ScheduleError: an item is neither an `Action` nor such a tuple.

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


SCHEDULES: dict[str, Callable[..., Schedule]] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved": interleaved,
    "looped_bfs": looped_bfs,
    "zb_h1": zb_h1,
    "interleaved_zb": interleaved_zb,
    "zbv": zbv,
    "dualpipev": dualpipev,
}
"""The built-in schedules by name."""


def make_schedule(
    schedule: str | Callable[..., Any],
    ranks: int,
    microbatches: int,
    virtual_stages: int | None = None,
    costs: Costs | None = None,
) -> Schedule:
    """Makes a schedule and checks it.

    The same arguments yield the same schedule on every rank.

    Args:
        schedule: a key of `SCHEDULES`, or a function. The function is called with `ranks` and
            `microbatches`, and also with `virtual_stages` and `costs` if it has parameters with
            these names and the arguments are not None. It returns a `Schedule`, or the lists that
            `from_lists` accepts.
        ranks: the number of ranks in the pipeline.
        microbatches: the number of microbatches per batch.
        virtual_stages: the number of stages per rank. By default, it is one for `gpipe`, `1f1b` and
            `zb_h1`, and two for the other built-in schedules.
        costs: the durations of the passes, from which most zero-bubble schedules determine the
            order of the passes. By default, F, I and W take the same time.

    Returns:
        A schedule that passes `plan.validation.check`.

    Raises:
        ValueError: an argument is invalid, or the schedule does not support this number of
            `virtual_stages`.
        ScheduleError: a custom function returns an invalid schedule. `ScheduleError` is a subclass
            of `ValueError`.

    Example:
        >>> make_schedule("zbv", ranks=4, microbatches=8).stages
        8
        >>> def mine(ranks, microbatches):
        ...     passes = [(kind, m) for kind in "FB" for m in range(microbatches)]
        ...     return [[(kind, rank, m) for kind, m in passes] for rank in range(ranks)]
        >>> make_schedule(mine, ranks=2, microbatches=4).name
        'mine'
    """
    build = _builder(schedule)
    sizes = {"ranks": ranks, "microbatches": microbatches, "virtual_stages": virtual_stages}
    for name, value in sizes.items():
        if value is not None and (not isinstance(value, int) or value < 1):
            raise ValueError(f"`{name}` must be an integer >= 1. Received: {value!r}.")
    options = {"virtual_stages": virtual_stages, "costs": costs}
    names = inspect.signature(build).parameters
    result = build(
        ranks,
        microbatches,
        **{name: value for name, value in options.items() if value is not None and name in names},
    )
    if not isinstance(result, Schedule):
        result = from_lists(getattr(build, "__name__", "custom"), result)
    check(result)
    if (result.ranks, result.microbatches) != (ranks, microbatches):
        raise ScheduleError(
            f"The schedule {result.name} must have the requested numbers of ranks and "
            f"microbatches. Received: {result.ranks} ranks with {result.microbatches} "
            f"microbatches. Return lists for {ranks} ranks with {microbatches}."
        )
    if virtual_stages is not None and result.stages != ranks * virtual_stages:
        raise ValueError(
            f"The schedule {result.name} has {result.stages} stages on {ranks} ranks. Received: "
            f"virtual_stages={virtual_stages}. Omit `virtual_stages`, or use interleaved, "
            f"looped_bfs or interleaved_zb, which accept any number."
        )
    return result


def _builder(schedule: str | Callable[..., Any]) -> Callable[..., Any]:
    if callable(schedule):
        return schedule
    if str(schedule) not in SCHEDULES:
        raise ValueError(
            f"`schedule` must be one of {', '.join(SCHEDULES)}, or a function of ranks and "
            f"microbatches. Received: {schedule!r}."
        )
    return SCHEDULES[schedule]
