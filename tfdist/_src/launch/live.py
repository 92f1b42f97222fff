"""Describes a running job, for people and as JSON."""

import json
import math
import os
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tfdist._src.cluster.net.framing import printable
from tfdist._src.cluster.observation import RankState
from tfdist._src.cluster.tf_config import from_tf_config
from tfdist._src.launch.flight import findings
from tfdist._src.launch.flight.findings import UnacknowledgedData, listed, longest, seconds, workers
from tfdist._src.monitoring import stragglers
from tfdist._src.options import TLS_VARIABLES
from tfdist.errors import ClusterError, LaunchError

_REMEDY = "pass the process ID of a worker or of `tfdist run`, or the address of rank 0, HOST:PORT"


def find_job(pid: int) -> tuple[str, dict[str, str]]:
    """Finds the job of a process on this host: rank 0's address and a worker's environment.

    Args:
        pid: the process ID of a worker, or of an ancestor such as `tfdist run`.

    Returns:
        `"host:port"`, and the environment variables at the start of the worker.

    Raises:
        LaunchError: the process does not exist, belongs to another user, or is not part of a job.
    """
    failure: LaunchError | None = None
    for process in _with_descendants(pid):
        try:
            environment = _environment(process)
            topology = from_tf_config(environment.get("TF_CONFIG"))
        except ClusterError as error:
            failure = failure or LaunchError(f"the environment of process {process}: {error}")
        except LaunchError as error:
            failure = failure or error
        else:
            if topology.size > 1:
                return topology.workers[0].address, environment
    raise failure or LaunchError(
        f"process {pid} was not started with a TF_CONFIG of several workers, nor were its child "
        f"processes: {_REMEDY}."
    )


def _with_descendants(pid: int) -> Iterator[int]:
    """Yields a process and its descendants, parents first."""
    yield pid
    for thread in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            children = thread.read_text().split()
        except OSError:  # It has ended.
            continue
        for child in children:
            yield from _with_descendants(int(child))


def _environment(pid: int) -> dict[str, str]:
    """Returns the initial environment of a process, with absolute paths of TLS files."""
    try:
        folder = Path(f"/proc/{pid}/cwd").resolve()
        content = Path(f"/proc/{pid}/environ").read_bytes()
    except PermissionError as error:
        raise LaunchError(
            f"the environment of process {pid} cannot be read: run this command as the user who "
            "started it."
        ) from error
    except OSError as error:
        raise LaunchError(f"there is no process {pid} on this host: {_REMEDY}.") from error
    pairs = (os.fsdecode(entry).partition("=") for entry in content.split(b"\0") if entry)
    variables = {name: value for name, _, value in pairs}
    files = (name for name in variables if name in TLS_VARIABLES and variables[name])
    return variables | {name: str(folder / variables[name]) for name in files}


_MAX_TEXT = 500
_MAX_NAMED = 8


@dataclass(frozen=True)
class Operation:
    """An operation that a rank is in: a collective, a message, or an exchange of the session.

    Attributes:
        communicator: the name of its group; "session" for an exchange, which all ranks join.
        what: a description for people.
        number: the number of a collective or an exchange, the same on all ranks.
        seconds: the time since the rank began it.
        waits_for: some of the ranks that had not joined, by their latest reports.
        missing: the number of members that had not joined.
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
        bytes: the bytes that arrived at the other rank between the two reports; None if unknown.
        bytes_per_second: the rate of arrival at the other rank while data was in transit; None if
            data was not in transit for long enough to measure the rate.
        pending_bytes: the number of bytes sent and not acknowledged.
        silent_seconds: seconds since the last acknowledgment.
        delay: the mean delay in seconds of small messages from the other rank between the two
            reports.
    """

    rank: int
    bytes: int | None
    bytes_per_second: float | None
    pending_bytes: int
    silent_seconds: float
    delay: float


@dataclass(frozen=True)
class Activity:
    """The latest report of a rank about itself, and its activity since an earlier report.

    Attributes:
        host: its host's name.
        pid: its process ID.
        joined: seconds since it joined the job.
        steps: training, evaluation and prediction steps that have received their input.
        collectives: the number of completed collectives and messages.
        resident_bytes: the size of its resident set.
        queued: the number of operations that wait behind the current ones.
        operations: its current operations, longest first.
        idle: seconds since its last operation; None if it is in an operation, or never was in any.
        input_wait: seconds that it has waited for its next batch; None if it is not waiting.
        main: the innermost call of user code in its main thread.
        seconds: the time between the two reports, by its own clock; 0 if there is only one report.
            The attributes below refer to this time.
        steps_per_second: the rate of steps.
        rows_per_second: the rate of input rows.
        collectives_per_second: the rate of completed collectives and messages.
        input: the share of time spent waiting for input.
        workers: the share of time spent waiting for other workers.
        network: the share of time spent waiting for data in transit.
        sent_per_second: the rate of bytes sent to other hosts.
        shared_per_second: the rate of bytes copied to the memory shared with workers of its host.
        links: its busiest connections to ranks of other hosts.
        leader: the first rank of its host; None if not reported.
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
        worker: its name in messages.
        state: "answered", "unresponsive", "gone" or "failed" (its report cannot be used).
        reason: why it is gone, or the problem with its report; else "".
        silence: seconds since rank 0 last heard from it; None if it is gone.
        activity: its report about itself; None unless it answered.
    """

    rank: int
    worker: str
    state: str
    reason: str
    silence: float | None
    activity: Activity | None


def ranks(before: Sequence[RankState], after: Sequence[RankState]) -> list[Rank]:
    """Returns the state of the ranks at the second answer, and their activity since the first.

    Args:
        before: the first answer of rank 0.
        after: its second answer.
    """
    earlier = {one.rank: one.report for one in before}
    absent = _absent(after)
    return [_rank(earlier.get(one.rank), one, absent) for one in after]


def _absent(seen: Sequence[RankState]) -> dict[int, list[int]]:
    """Returns, for the number of each exchange in progress, the ranks that have not joined it."""
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


def _rank(before: dict[str, Any] | None, seen: RankState, absent: dict[int, list[int]]) -> Rank:
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
    # The counted input time can decrease between two reports, because a report leaves out the
    # current wait for input while the input pipeline is in a collective.
    waits = {key: min(1.0, max(0.0, rate(key))) for key in ("input", "workers", "network")}
    longest = operations[0] if operations else None
    # A wait is counted when it ends. This wait has not ended, and covers all the time.
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
        # Reports of earlier versions do not contain it.
        leader=None if after.get("leader") is None else int(after["leader"]),
    )


def _operation(raw: Any, absent: dict[int, list[int]]) -> Operation:
    waits_for, missing = raw["waits_for"], raw["missing"]
    if _is_exchange(raw):
        waits_for = absent[raw["number"]][:_MAX_NAMED]
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
    # Reports of earlier versions lack the last two counts.
    return [*map(_number, raw), 0.0, 0.0][:6]


def _link(rank: int, before: list[float] | None, now: list[float]) -> Link:
    came, busy_us, _, _, frames, delay_us = (
        after - earlier for after, earlier in zip(now, before or [0.0] * len(now), strict=True)
    )
    seconds = 1e-6 * busy_us
    # The counts shrink if a group has been closed meanwhile.
    known = before is not None and seconds >= stragglers.MIN_BUSY_SECONDS and came >= 0
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


# Higher than the monitor's default, because this sample has few steps and few messages.
_FACTOR = 1.5
_LINK_FACTOR = 3.0
_MIN_STEPS = 4


def find_straggler(ranks: Sequence[Rank]) -> stragglers.Straggler | None:
    """Finds the rank or link that delays the others, by the activity of all ranks."""
    known = [one.activity for one in ranks if one.activity and one.activity.steps_per_second > 0]
    if len(known) < len(ranks):
        return None
    hosts = [n if one.leader is None else one.leader for n, one in enumerate(known)]
    measured = [_measurement(one, hosts) for one in known]
    process = None
    # A wait is counted when it ends. Among few steps, a single wait changes the result.
    if min(one.steps_per_second * one.seconds for one in known) >= _MIN_STEPS:
        process = stragglers.find_slow_process(measured, _FACTOR)
    return stragglers.costlier(process, stragglers.find_slow_link(measured, _LINK_FACTOR, hosts))


def find_backlogs(ranks: Sequence[Rank], least_seconds: float) -> tuple[UnacknowledgedData, ...]:
    """Finds data in transit to other hosts for at least `least_seconds`; the longest first."""
    found = longest(
        UnacknowledgedData(
            sender=one.worker,
            receiver=ranks[link.rank].worker,
            bytes=link.pending_bytes,
            bytes_per_second=link.bytes_per_second or 0.0,
            silent_seconds=link.silent_seconds,
        )
        for one in ranks
        for link in (one.activity.links if one.activity else ())
        if link.pending_bytes > 0 and 0 <= link.rank < len(ranks)
    )
    return tuple(one for one in found if one.seconds >= least_seconds)


def _measurement(activity: Activity, hosts: Sequence[int]) -> stragglers.Measurement:
    step = 1.0 / activity.steps_per_second
    links = {
        link.rank: stragglers.Traffic(link.bytes, link.bytes / link.bytes_per_second, link.delay)
        for link in activity.links
        if link.bytes and link.bytes_per_second and 0 <= link.rank < len(hosts)
    }
    times = (step, activity.input * step, activity.workers * step, activity.network * step)
    return stragglers.Measurement.with_links(*times, links, hosts)


LONG_SECONDS = 1.0
"""A rank in an operation for less than this may be making progress."""


@dataclass(frozen=True)
class Wait:
    """A rank that has been in the same operation for at least `LONG_SECONDS`."""

    rank: Rank
    operation: Operation


def find_waits(ranks: Sequence[Rank]) -> list[Wait]:
    """Finds ranks that have been in an operation for `LONG_SECONDS` or more; the longest first."""
    found = [
        Wait(one, one.activity.operations[0])
        for one in ranks
        if one.activity
        and one.activity.operations
        and one.activity.operations[0].seconds >= LONG_SECONDS
    ]
    return sorted(found, key=lambda wait: -wait.operation.seconds)


def waited_for(ranks: Sequence[Rank]) -> list[Rank]:
    """Returns the ranks that others wait for and that do not wait themselves.

    If ranks wait, but for no such rank, returns the unresponsive ranks, since they may have joined
    an operation and then been stopped in the middle of it.
    """
    waits = find_waits(ranks)
    wanted = set().union(*(_absent_ranks(wait, ranks) for wait in waits))
    waiting = {wait.rank.rank for wait in waits}
    found = [one for one in ranks if one.rank in wanted - waiting]
    if found or not waits:
        return found
    return [one for one in ranks if one.state == "unresponsive"]


def headline(ranks: Sequence[Rank]) -> str:
    """Summarizes the job, most important facts first.

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
        sentences.append(findings.describe_backlogs(pending))
    if not waits and (straggler := find_straggler(ranks)):
        sentences.append(stragglers.describe(straggler, lambda rank: _on_host(ranks[rank])))
    silent = [one.worker for one in others if one.state == "unresponsive"]
    if silent:
        sentences.append(f"{workers(silent)} {_do(silent)} not respond.")
    sentences += [f"{one.worker} {one.reason}." for one in others if one.state == "gone"][:3]
    return " ".join(sentences)


def doing(rank: Rank) -> str:
    """Describes a rank's current activity.

    Example:
        >>> doing(Rank(1, "worker 1 (a:1)", "unresponsive", "", 4.0, None))
        'does not respond, last heard from 4.0 s ago'
    """
    if rank.state == "unresponsive":
        return f"does not respond, last heard from {seconds(rank.silence or 0.0)} ago"
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
    text = f"in {_common_operation(first)} for {seconds(first.seconds)}"
    if first.seconds >= LONG_SECONDS and first.waits_for:
        names = listed([str(rank) for rank in first.waits_for])
        text += f", waits for rank{'s' * (len(first.waits_for) > 1)} {names}"
    return text + (f", {activity.queued} more queued" if activity.queued else "")


def _absent_ranks(wait: Wait, ranks: Sequence[Rank]) -> set[int]:
    """Returns the ranks that a rank waits for, without ranks that have since joined."""
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
    where = f"in {_common_operation(first.operation)} for {seconds(first.operation.seconds)}"
    head = f"{len(waits)} of {len(ranks)} ranks {'waits' if len(waits) == 1 else 'wait'} {where}"
    if len(causes) == 1:
        return f"{head} for {_cause(causes[0])}."
    if causes:
        return f"{head} for {workers([one.worker for one in causes])}."
    if any(_absent_ranks(wait, ranks) for wait in waits):
        return f"{head}: they wait for one another."
    if any(wait.operation.missing > len(wait.operation.waits_for) for wait in waits):
        return f"{head}."
    return f"{head}: all have joined it, and its data transfer is slow or stuck."


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


def _common_operation(operation: Operation) -> str:
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


_MAX_ROWS = 64
_COLUMNS = (
    "rank",
    "host",
    "steps",
    "steps/s",
    "input",
    "workers",
    "network",
    "sent/s",
    "shared/s",
    "memory",
    "now",
)
_LEFT = ("host", "now")
# The version of the JSON object's keys.
_FORMAT = 1


def live_text(ranks: Sequence[Rank], *, most: int | None = _MAX_ROWS) -> str:
    """Formats the headline and a table with a row for each rank, ranks that others wait for first.

    Args:
        ranks: all ranks of the job.
        most: the maximum number of rows; None for all.
    """
    causes = waited_for(ranks)
    # Sorting is stable: ranks with equal keys stay in order.
    order = sorted(ranks, key=lambda one: (one not in causes, one.state == "answered"))
    rows = [_COLUMNS, *map(_row, order[:most])]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(map(_aligned, _COLUMNS, row, widths)).rstrip() for row in rows]
    more = len(order) - len(rows) + 1
    return "\n".join([headline(ranks), "", *lines, *([f"and {more} more: --all"] if more else [])])


def live_json(address: str, ranks: Sequence[Rank]) -> str:
    """Formats the job's state as one JSON object; docs/guide/monitoring.md lists its keys."""
    whole = {
        "format": _FORMAT,
        "job": address,
        "size": len(ranks),
        "headline": headline(ranks),
        "waited_for": [one.rank for one in waited_for(ranks)],
        "ranks": [{**asdict(one), "doing": doing(one)} for one in ranks],
    }
    return json.dumps(whole, indent=2)


def _row(rank: Rank) -> tuple[str, ...]:
    known = rank.activity
    numbers = _numbers(known) if known else ("-",) * (len(_COLUMNS) - 3)
    return (str(rank.rank), known.host if known else "-", *numbers, doing(rank))


def _numbers(known: Activity) -> tuple[str, ...]:
    return (
        str(known.steps),
        f"{known.steps_per_second:.3g}",
        *(f"{share:.0%}" for share in (known.input, known.workers, known.network)),
        _bytes(known.sent_per_second),
        _bytes(known.shared_per_second),
        _bytes(known.resident_bytes),
    )


def _bytes(count: float) -> str:
    """Formats a number of bytes in three digits.

    Example:
        >>> _bytes(0), _bytes(1536), _bytes(1e9)
        ('0 B', '1.5 KiB', '954 MiB')
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1024
    return f"{count:.3g} TiB"


def _aligned(column: str, text: str, width: int) -> str:
    return f"{text:<{width}}" if column in _LEFT else f"{text:>{width}}"
