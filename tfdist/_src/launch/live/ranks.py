"""The ranks of a running job, from what they said at two moments."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tfdist._src.cluster.net.framing import printable
from tfdist._src.cluster.observation import Seen
from tfdist._src.monitoring.stragglers import LEAST_BUSY_SECONDS

_MAX_TEXT = 500
_MOST_NAMED = 8


@dataclass(frozen=True)
class Operation:
    """A collective, a message, or an exchange of the session that a rank is in.

    Attributes:
        communicator: its group; "session" for an exchange, which all ranks join.
        what: the operation for people.
        number: of a collective or an exchange, the same on all ranks.
        seconds: since the rank began it.
        waits_for: some of the job's ranks that had not joined, by what they said last.
        missing: how many members had not.
    """

    communicator: str
    what: str
    number: int
    seconds: float
    waits_for: tuple[int, ...]
    missing: int


@dataclass(frozen=True)
class Link:
    """A rank's connections to a rank of another host.

    Attributes:
        rank: the other rank.
        bytes: that have come there between the two moments; None if that cannot be told.
        bytes_per_second: how fast data came there while some was on its way; None if that was never
            long enough to tell.
        pending_bytes: sent, and not acknowledged.
        silent_seconds: for how long none of that has been acknowledged.
        delay: mean seconds that small messages from there took between the two moments.
    """

    rank: int
    bytes: int | None
    bytes_per_second: float | None
    pending_bytes: int
    silent_seconds: float
    delay: float


@dataclass(frozen=True)
class Activity:
    """What a rank said of itself.

    Attributes:
        host: its host's name.
        pid: its process.
        joined: seconds since it joined the job.
        steps: steps of training, evaluation and prediction that have got their input.
        collectives: collectives and messages that have ended.
        resident_bytes: its resident set.
        queued: operations that wait behind the current ones.
        operations: what it is in; the longest first.
        idle: seconds for which it has been in no operation; None if it is in one, or never was.
        input_wait: seconds for which it has waited for its next batch; None if it does not.
        main: the innermost call of the user's program in its main thread.
        seconds: the time between the two moments, by its own clock; 0 if there is only one. The
            others are of that time.
        steps_per_second: steps.
        rows_per_second: rows of its input.
        collectives_per_second: collectives and messages that ended.
        input: the share of time that it waited for its input.
        workers: the share that it waited for other workers.
        network: the share that it waited for data that moved.
        sent_per_second: bytes sent to other hosts.
        shared_per_second: bytes copied to the memory shared with workers of its host.
        links: its connections to ranks of other hosts; the busiest.
        leader: the first rank of its host; None if it did not tell.
    """

    host: str
    pid: int
    joined: float
    steps: int
    collectives: int
    resident_bytes: int
    queued: int
    operations: tuple[Operation, ...]
    idle: float | None
    input_wait: float | None
    main: str
    seconds: float
    steps_per_second: float
    rows_per_second: float
    collectives_per_second: float
    input: float
    workers: float
    network: float
    sent_per_second: float
    shared_per_second: float
    links: tuple[Link, ...]
    leader: int | None


@dataclass(frozen=True)
class Rank:
    """A rank of the job.

    Attributes:
        rank: the rank.
        worker: what messages call it.
        state: "answered", "unresponsive", "gone" or "failed" (its report cannot be used).
        reason: why it is gone, or what is wrong with its report; else "".
        silence: seconds since rank 0 last heard of it; None if it is gone.
        activity: what it said of itself; None unless it answered.
    """

    rank: int
    worker: str
    state: str
    reason: str
    silence: float | None
    activity: Activity | None


def ranks(before: Sequence[Seen], after: Sequence[Seen]) -> list[Rank]:
    """The ranks at the second moment, and what they did since the first.

    Args:
        before: the first answer of rank 0.
        after: its second answer.
    """
    earlier = {one.rank: one.report for one in before}
    absent = _absent(after)
    return [_rank(earlier.get(one.rank), one, absent) for one in after]


def _absent(seen: Sequence[Seen]) -> dict[int, list[int]]:
    """By the number of an exchange, who is not in it; of the exchanges that some ranks are in."""
    joined = defaultdict(set)
    for one in seen:
        operations = (one.report or {}).get("operations")
        for operation in operations if isinstance(operations, list) else ():
            if isinstance(operation, dict) and _is_exchange(operation):
                joined[operation["number"]].add(one.rank)
    everyone = [one.rank for one in seen]
    return {
        number: [rank for rank in everyone if rank not in inside]
        for number, inside in joined.items()
    }


def _is_exchange(raw: dict[str, Any]) -> bool:
    return raw.get("waits_for", ()) is None and type(raw.get("number")) is int


def _rank(before: dict[str, Any] | None, seen: Seen, absent: dict[int, list[int]]) -> Rank:
    def result(state: str, reason: str = "", activity: Activity | None = None) -> Rank:
        return Rank(seen.rank, seen.worker, state, reason, seen.silence, activity)

    if seen.gone:
        return result("gone", seen.gone)
    if seen.report is None:
        return result("unresponsive")
    if "error" in seen.report:
        return result("failed", _text(seen.report["error"]))
    try:
        return result("answered", activity=_activity(before or {}, seen.report, absent))
    except (LookupError, ArithmeticError, TypeError, ValueError):
        return result("failed", "its report is malformed")


def _activity(
    before: dict[str, Any], after: dict[str, Any], absent: dict[int, list[int]]
) -> Activity:
    same = before.get("pid") == after["pid"]
    seconds = _number(after["time"]) - _number(before["time"]) if same else 0.0

    def rate(key: str) -> float:
        return (_number(after[key]) - _number(before[key])) / seconds if seconds > 0 else 0.0

    found = (_operation(one, absent) for one in after["operations"])
    operations = tuple(sorted(found, key=lambda one: -one.seconds))
    # Of a wait for input that still lasts, a collective in it may take a part back.
    waits = {key: min(1.0, max(0.0, rate(key))) for key in ("input", "workers", "network")}
    longest = operations[0] if operations else None
    # A wait is counted when it ends; this one has lasted all the time.
    if longest and 0 < seconds <= longest.seconds and not rate("steps"):
        key = "workers" if longest.missing else "network"
        waits[key] = max(0.0, 1.0 - sum(waits.values()) + waits[key])
    return Activity(
        host=_text(after["host"]),
        pid=int(after["pid"]),
        joined=_number(after["joined"]),
        steps=int(after["steps"]),
        collectives=int(after["collectives"]),
        resident_bytes=int(after["resident_bytes"]),
        queued=int(after["queued"]),
        operations=operations,
        idle=None if after["idle"] is None else _number(after["idle"]),
        input_wait=None if after["input_wait"] is None else _number(after["input_wait"]),
        main=_text(after["main"]),
        seconds=seconds,
        steps_per_second=rate("steps"),
        rows_per_second=rate("rows"),
        collectives_per_second=rate("collectives"),
        **waits,
        sent_per_second=rate("sent_bytes"),
        shared_per_second=rate("shared_bytes"),
        links=_links(before.get("links", []) if same else [], after.get("links", [])),
        # Reports of earlier versions do not tell it.
        leader=None if after.get("leader") is None else int(after["leader"]),
    )


def _operation(raw: Any, absent: dict[int, list[int]]) -> Operation:
    waits_for, missing = raw["waits_for"], raw["missing"]
    if _is_exchange(raw):
        waits_for = absent[raw["number"]][:_MOST_NAMED]
        missing = len(absent[raw["number"]])
    return Operation(
        _text(raw["communicator"]),
        _text(raw["what"]),
        int(raw["number"]),
        _number(raw["seconds"]),
        tuple(map(int, waits_for)),
        int(missing),
    )


def _links(before: Any, after: Any) -> tuple[Link, ...]:
    earlier = {int(rank): _counts(counts) for rank, *counts in before}
    return tuple(_link(int(rank), earlier.get(int(rank)), _counts(now)) for rank, *now in after)


def _counts(raw: list[Any]) -> list[float]:
    # Reports of earlier versions do not have the last two.
    return [*map(_number, raw), 0.0, 0.0][:6]


def _link(rank: int, before: list[float] | None, now: list[float]) -> Link:
    came, busy_us, _, _, frames, delay_us = (
        after - earlier for after, earlier in zip(now, before or [0.0] * len(now), strict=True)
    )
    seconds = 1e-6 * busy_us
    # A group that has been closed meanwhile counts no longer.
    known = before is not None and seconds >= LEAST_BUSY_SECONDS and came >= 0
    return Link(
        rank=rank,
        bytes=int(came) if known else None,
        bytes_per_second=came / seconds if known else None,
        pending_bytes=int(now[2]),
        silent_seconds=1e-3 * now[3],
        delay=max(0.0, 1e-6 * delay_us / max(1.0, frames)),
    )


def _number(value: Any) -> float:
    if type(value) not in (int, float):
        raise TypeError(value)
    if not math.isfinite(value):
        raise ValueError(value)
    return float(value)


def _text(value: Any) -> str:
    return printable(str(value)[:_MAX_TEXT])
