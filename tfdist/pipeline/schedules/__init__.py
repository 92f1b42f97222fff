"""The schedules by name, and users' own."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from tfdist.errors import ScheduleError
from tfdist.pipeline.plan.costs import Costs
from tfdist.pipeline.plan.schedule import Schedule
from tfdist.pipeline.plan.validation import check
from tfdist.pipeline.schedules.custom import from_lists
from tfdist.pipeline.schedules.dualpipev import dualpipev
from tfdist.pipeline.schedules.gpipe import gpipe
from tfdist.pipeline.schedules.interleaved import interleaved
from tfdist.pipeline.schedules.interleaved_zb import interleaved_zb
from tfdist.pipeline.schedules.looped_bfs import looped_bfs
from tfdist.pipeline.schedules.one_f_one_b import one_f_one_b
from tfdist.pipeline.schedules.zb_h1 import zb_h1
from tfdist.pipeline.schedules.zbv import zbv

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


def make_schedule(
    schedule: str | Callable[..., Any],
    ranks: int,
    microbatches: int,
    virtual_stages: int | None = None,
    costs: Costs | None = None,
) -> Schedule:
    """Makes a schedule and checks it.

    The same arguments give the same schedule on every rank.

    Args:
        schedule: a key of `SCHEDULES`; or a function that takes `ranks` and `microbatches`, and
            `virtual_stages` and `costs` if it has parameters of these names. It returns a
            `Schedule`, or for each rank a list of `Action`s or of tuples
            (kind, stage, microbatch).
        ranks: the processes of the pipeline.
        microbatches: the parts of a batch.
        virtual_stages: the number of stages on each rank; by default one for `gpipe`, `1f1b` and
            `zb_h1`, and two for the others.
        costs: what the passes take; the zero-bubble schedules order theirs by it. By default each
            kind takes the same.

    Returns:
        A schedule that passes `tfdist.pipeline.plan.validation.check`.

    Raises:
        ValueError: an argument is wrong, or the schedule cannot have these stages.
        ScheduleError: a function of your own returns a schedule that is wrong; a `ValueError` too.

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
    given = {"ranks": ranks, "microbatches": microbatches, "virtual_stages": virtual_stages}
    for name, value in given.items():
        if value is not None and (not isinstance(value, int) or value < 1):
            raise ValueError(f"`{name}` is a whole number from 1 on. Received: {value!r}.")
    options = {"virtual_stages": virtual_stages, "costs": costs}
    taken = inspect.signature(build).parameters
    made = build(
        ranks,
        microbatches,
        **{name: value for name, value in options.items() if value is not None and name in taken},
    )
    if not isinstance(made, Schedule):
        made = from_lists(getattr(build, "__name__", "own"), made)
    check(made)
    if (made.ranks, made.microbatches) != (ranks, microbatches):
        raise ScheduleError(
            f"The schedule {made.name} has as many ranks and microbatches as it is asked for. "
            f"Received: {made.ranks} ranks with {made.microbatches} microbatches. Return lists for "
            f"{ranks} with {microbatches}."
        )
    if virtual_stages is not None and made.stages != ranks * virtual_stages:
        raise ValueError(
            f"The schedule {made.name} has {made.stages} stages on {ranks} ranks. Received: "
            f"virtual_stages={virtual_stages}. Leave `virtual_stages` out, or use interleaved, "
            f"looped_bfs or interleaved_zb, which accept any number."
        )
    return made


def _builder(schedule: str | Callable[..., Any]) -> Callable[..., Any]:
    if callable(schedule):
        return schedule
    if str(schedule) not in SCHEDULES:
        raise ValueError(
            f"A schedule is one of {', '.join(SCHEDULES)}, or a function of ranks and "
            f"microbatches. Received: {schedule!r}."
        )
    return SCHEDULES[schedule]
