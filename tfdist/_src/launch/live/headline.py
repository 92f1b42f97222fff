"""What is going on in a running job, in one line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tfdist._src.launch.flight import backlogs
from tfdist._src.launch.flight.words import listed, seconds, workers
from tfdist._src.launch.live.ranks import Activity, Operation, Rank
from tfdist._src.launch.live.slowness import find_backlogs, find_straggler
from tfdist._src.monitoring.straggler_messages import describe

LONG_SECONDS = 1.0
"""What a rank is in for less may be in progress."""


@dataclass(frozen=True)
class Wait:
    """A rank that has been in one operation for long."""

    rank: Rank
    operation: Operation


def find_waits(ranks: Sequence[Rank]) -> list[Wait]:
    """The ranks that have been in an operation for long; the longest first."""
    found = [
        Wait(one, one.activity.operations[0])
        for one in ranks
        if one.activity
        and one.activity.operations
        and one.activity.operations[0].seconds >= LONG_SECONDS
    ]
    return sorted(found, key=lambda wait: -wait.operation.seconds)


def waited_for(ranks: Sequence[Rank]) -> list[Rank]:
    """The ranks that others wait for, and that wait for nobody themselves.

    Where there is none but ranks wait, those that do not respond: they may have joined an operation
    and then been stopped in the middle of it.
    """
    waits = find_waits(ranks)
    wanted = set().union(*(_absent(wait, ranks) for wait in waits))
    waiting = {wait.rank.rank for wait in waits}
    found = [one for one in ranks if one.rank in wanted - waiting]
    if found or not waits:
        return found
    return [one for one in ranks if one.state == "unresponsive"]


def headline(ranks: Sequence[Rank]) -> str:
    """What is going on, the most important first.

    Args:
        ranks: all ranks of the job.

    Returns:
        Sentences in one line.
    """
    waits = find_waits(ranks)
    causes = waited_for(ranks)
    others = [one for one in ranks if one not in causes]
    sentences = [_waiting(waits, causes, ranks) if waits else _progress(ranks)]
    if waits and (pending := find_backlogs(ranks, LONG_SECONDS)):
        sentences.append(backlogs.describe(pending))
    if not waits and (straggler := find_straggler(ranks)):
        sentences.append(describe(straggler, lambda rank: _on_host(ranks[rank])))
    silent = [one.worker for one in others if one.state == "unresponsive"]
    if silent:
        sentences.append(f"{workers(silent)} {_do(silent)} not respond.")
    sentences += [f"{one.worker} {one.reason}." for one in others if one.state == "gone"][:3]
    return " ".join(sentences)


def doing(rank: Rank) -> str:
    """What a rank is doing now.

    Example:
        >>> doing(Rank(1, "worker 1 (a:1)", "unresponsive", "", 4.0, None))
        'does not respond, last heard of 4.0 s ago'
    """
    if rank.state == "unresponsive":
        return f"does not respond, last heard of {seconds(rank.silence or 0.0)} ago"
    if rank.activity is None:
        return rank.reason
    if rank.activity.operations:
        return _inside(rank.activity)
    if rank.activity.idle is None:
        return f"in no collective yet: {_main(rank.activity)}"
    for_long = rank.activity.idle >= LONG_SECONDS
    where = f": {_main(rank.activity)}" if for_long else ""
    return f"in no collective for {seconds(rank.activity.idle)}{where}"


def _inside(activity: Activity) -> str:
    first = activity.operations[0]
    text = f"in {_operation(first)} for {seconds(first.seconds)}"
    if first.seconds >= LONG_SECONDS and first.waits_for:
        names = listed([str(rank) for rank in first.waits_for])
        text += f", waits for rank{'s' * (len(first.waits_for) > 1)} {names}"
    return text + (f", {activity.queued} more queued" if activity.queued else "")


def _absent(wait: Wait, ranks: Sequence[Rank]) -> set[int]:
    """For whom a rank waits, but for those that have come without its having heard of it yet."""
    here = (wait.operation.communicator, wait.operation.number)
    found = {one for one in wait.operation.waits_for if one < len(ranks)}
    inside = {one: ranks[one].activity for one in found}
    return {
        rank
        for rank, known in inside.items()
        if not known or here not in [(one.communicator, one.number) for one in known.operations]
    }


def _waiting(waits: Sequence[Wait], causes: Sequence[Rank], ranks: Sequence[Rank]) -> str:
    first = next(
        (w for w in waits if {one.rank for one in causes} & {*w.operation.waits_for}), waits[0]
    )
    where = f"in {_operation(first.operation)} for {seconds(first.operation.seconds)}"
    head = f"{len(waits)} of {len(ranks)} ranks {'waits' if len(waits) == 1 else 'wait'} {where}"
    if len(causes) == 1:
        return f"{head} for {_cause(causes[0])}."
    if causes:
        return f"{head} for {workers([one.worker for one in causes])}."
    if any(_absent(wait, ranks) for wait in waits):
        return f"{head}: they wait for one another."
    if any(wait.operation.missing > len(wait.operation.waits_for) for wait in waits):
        return f"{head}."
    return f"{head}: all have joined it, and its data is slow or does not move."


def _cause(rank: Rank) -> str:
    what = doing(rank)
    verb = "is " if rank.activity and what.startswith("in ") else ""
    return f"{_on_host(rank)}, which {verb}{what}"


def _on_host(rank: Rank) -> str:
    return f"{rank.worker} on {rank.activity.host}" if rank.activity else rank.worker


def _progress(ranks: Sequence[Rank]) -> str:
    found = [one.activity for one in ranks if one.activity]
    if not found:
        return "No rank has answered."
    who = f"All {len(found)}" if len(found) == len(ranks) else f"{len(found)} of {len(ranks)}"
    head = f"{who} ranks {'is' if len(found) == 1 else 'are'} running"
    longest = max(one.seconds for one in found)
    steps = max(one.steps_per_second for one in found)
    collectives = max(one.collectives_per_second for one in found)
    if steps:
        rows = sum(one.rows_per_second for one in found)
        return f"{head}: {_rate(steps)} steps/s, {_rate(rows)} rows/s."
    if collectives:
        return f"{head}: {_rate(collectives)} collectives/s, and no step has begun."
    places = sorted({one.main for one in found if one.main})
    where = f"; their main threads are in {listed(places)}" if places else ""
    return f"No rank is in a collective, and none has ended in {seconds(longest)}{where}."


def _operation(operation: Operation) -> str:
    return f"{operation.what} (number {operation.number} of '{operation.communicator}')"


def _main(activity: Activity) -> str:
    main = f"its main thread is in {activity.main}" if activity.main else "without a main thread"
    if activity.input_wait is None:
        return main
    return f"it has waited {seconds(activity.input_wait)} for its next batch, and {main}"


def _rate(value: float) -> str:
    return f"{value:.3g}" if value < 100 else f"{value:,.0f}"


def _do(names: Sequence[str]) -> str:
    return "do" if len(names) > 1 else "does"
