"""Describes what the ranks of a running job are doing, as text or as JSON."""

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
    """Finds the job to which a process on this host belongs.

    Args:
        pid: the process ID of a worker, or of an ancestor of a worker, such as `tfdist run`.

    Returns:
        The address of rank 0, `"host:port"`, and the environment variables with which a worker of
        the job was started. They contain the job's secret and the paths of its TLS files.

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
    """Yields the IDs of a process and all its descendants; a parent precedes its children."""
    yield pid
    for thread in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            children = thread.read_text().split()
        except OSError:  # The process has ended.
            continue
        for child in children:
            yield from _with_descendants(int(child))


def _environment(pid: int) -> dict[str, str]:
    """Returns the environment variables with which a process was started.

    If the paths of TLS files are relative, they are made absolute.
    """
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
    """An operation that is in progress on a rank: a collective, a message, or an exchange.

    An exchange is an operation of all ranks over the control connections, in which the workers
    compare, for example, their programs and batches.

    Attributes:
        communicator: the name of the communicator; "session" for an exchange.
        what: a description of the operation for people.
        number: the number of the operation. The number of a collective or an exchange is the same
            on all ranks.
        seconds: the number of seconds since the rank began the operation.
        waits_for: some of the ranks that had not joined the operation, according to the last status
            of each rank.
        missing: the number of all members that had not joined the operation.
    """

    communicator: str
    what: str
    number: int
    seconds: float
    waits_for: tuple[int, ...]
    missing: int


@dataclass(frozen=True)
class Link:
    """The data connections from a rank to a rank of another host.

    The doctor requests two reports from each rank. Rates and delays refer to the time between them.

    Attributes:
        rank: the other rank.
        bytes: the number of bytes that arrived at the other rank between the two reports; None if
            unknown.
        bytes_per_second: the rate at which bytes arrived at the other rank while data was in
            transit; None if data was in transit for too short a time to measure the rate.
        pending_bytes: the number of bytes that were sent and have not been acknowledged.
        silent_seconds: the number of seconds since the last acknowledgment.
        delay: for small messages from the other rank, the mean number of seconds in transit.
    """

    rank: int
    bytes: int | None
    bytes_per_second: float | None
    pending_bytes: int
    silent_seconds: float
    delay: float


@dataclass(frozen=True)
class Activity:
    """The state of a rank in its second report, and its activity since its first report.

    Attributes:
        host: the name of the rank's host.
        pid: the rank's process ID.
        joined: the number of seconds since the rank joined the job.
        steps: the number of training, evaluation and prediction steps that have received their
            input.
        collectives: the number of collectives and messages that have ended.
        resident_bytes: the resident memory of the rank's process, in bytes.
        queued: the number of operations that wait until the current operations have ended.
        operations: the current operations; the operation that began first is first.
        idle: the number of seconds since the rank's last operation ended. None if the rank is in an
            operation, or has never been in an operation.
        input_wait: the number of seconds for which the rank has been waiting for its next batch;
            None if it is not waiting for a batch.
        main: the innermost call of user code in the rank's main thread.
        seconds: the number of seconds between the two reports, by the rank's own clock; 0 if there
            is only one report. The attributes below refer to this time.
        steps_per_second: the number of steps per second.
        rows_per_second: the number of rows of the rank's own input per second.
        collectives_per_second: the number of collectives and messages that ended, per second.
        input: the share of time in which the rank waited for its input.
        workers: the share of time in which the rank waited for other workers.
        network: the share of time in which the rank waited for data in transit.
        sent_per_second: the number of bytes that the rank sent to other hosts, per second.
        shared_per_second: the number of bytes per second that the rank copied to the memory that it
            shares with other workers of its host.
        preprocessed: the rank's share of the preprocessing of the batches that it read; None if it
            has read none, or if the preprocessing is not divided among the workers.
        links: the busiest connections to ranks of other hosts.
        leader: the lowest rank on the rank's host; None if the report does not contain it.
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
    preprocessed: float | None
    links: tuple[Link, ...]
    leader: int | None


@dataclass(frozen=True)
class Rank:
    """A rank of the job, and what is known about its state.

    Attributes:
        rank: the rank.
        worker: the name of the rank's worker in messages.
        state: "answered", "unresponsive", "gone" (the rank has left or is lost) or "failed" (the
            rank's report cannot be used).
        reason: why the rank is gone, or what is wrong with its report; otherwise "".
        silence: the number of seconds since rank 0 last heard from the rank; None if it is gone.
        activity: the rank's activity, from its reports; None unless the state is "answered".
    """

    rank: int
    worker: str
    state: str
    reason: str
    silence: float | None
    activity: Activity | None


def ranks(before: Sequence[RankState], after: Sequence[RankState]) -> list[Rank]:
    """Returns the state of all ranks, from two answers of rank 0.

    The state is that of the second answer. The activity covers the time between both answers.

    Args:
        before: the first answer of rank 0.
        after: the second answer of rank 0.
    """
    earlier = {one.rank: one.report for one in before}
    absent = _absent(after)
    return [_rank(earlier.get(one.rank), one, absent) for one in after]


def _absent(seen: Sequence[RankState]) -> dict[int, list[int]]:
    """Returns a dict from each exchange in progress to the ranks that have not joined it.

    An exchange is identified by its number.
    """
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
    # The reported time of waiting for input can decrease between two reports. The reason is that a
    # report leaves out the current wait while the input pipeline is in a collective.
    waits = {key: min(1.0, max(0.0, rate(key))) for key in ("input", "workers", "network")}
    longest = operations[0] if operations else None
    # The shares contain only waits that have ended. If the rank has been in one operation for the
    # whole time between the reports, add the wait in this operation.
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
        preprocessed=_preprocessed(before if same else {}, after),
        links=_links(before.get("links", []) if same else [], after.get("links", [])),
        # Reports of earlier versions do not contain the leader.
        leader=None if after.get("leader") is None else int(after["leader"]),
    )


def _preprocessed(before: dict[str, Any], after: dict[str, Any]) -> float | None:
    """Returns the share of rows that a rank has preprocessed between two reports."""
    divided, preprocessed = (
        _number(after.get(key, 0)) - _number(before.get(key, 0))
        for key in ("divided_rows", "preprocessed_rows")
    )
    # Rows are preprocessed before they are read.
    return min(1.0, preprocessed / divided) if divided else None


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
    # Reports of earlier versions do not contain the last two counts.
    return [*map(_number, raw), 0.0, 0.0][:6]


def _link(rank: int, before: list[float] | None, now: list[float]) -> Link:
    came, busy_us, _, _, frames, delay_us = (
        after - earlier for after, earlier in zip(now, before or [0.0] * len(now), strict=True)
    )
    seconds = 1e-6 * busy_us
    # The counts are lower in the second report if a communicator was closed between the reports.
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


# The factors by which a rank or a link must be slower than the others to count as a straggler. They
# are higher than the default of `StragglerMonitor`, because there are only few steps and messages
# between the two reports.
_FACTOR = 1.5
_LINK_FACTOR = 3.0
_MIN_STEPS = 4


def find_straggler(ranks: Sequence[Rank]) -> stragglers.Straggler | None:
    """Finds the rank or the link that delays the other ranks, if there is one.

    The result is None if any rank has not answered, or has not completed a step between its two
    reports.
    """
    known = [one.activity for one in ranks if one.activity and one.activity.steps_per_second > 0]
    if len(known) < len(ranks):
        return None
    hosts = [n if one.leader is None else one.leader for n, one in enumerate(known)]
    measured = [_measurement(one, hosts) for one in known]
    process = None
    # A wait counts for the step in which it ends. If there are only few steps, a single wait could
    # therefore make a rank look slow.
    if min(one.steps_per_second * one.seconds for one in known) >= _MIN_STEPS:
        process = stragglers.find_slow_process(measured, _FACTOR)
    return stragglers.costlier(process, stragglers.find_slow_link(measured, _LINK_FACTOR, hosts))


def find_backlogs(ranks: Sequence[Rank], least_seconds: float) -> tuple[UnacknowledgedData, ...]:
    """Finds delayed data between hosts; the data with the longest delay is first.

    Args:
        ranks: all ranks of the job.
        least_seconds: the minimum delay. The delay is the estimated number of seconds until all of
            the data has arrived, or the number of seconds since data last arrived, if that is more.
    """
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
"""A rank that has been in an operation for less than this may still be making progress."""


@dataclass(frozen=True)
class Wait:
    """A rank that has been in the same operation for at least `LONG_SECONDS`."""

    rank: Rank
    operation: Operation


def find_waits(ranks: Sequence[Rank]) -> list[Wait]:
    """Finds ranks that have been in the same operation for at least `LONG_SECONDS`.

    The rank that has been in its operation for the longest time is first.
    """
    found = [
        Wait(one, one.activity.operations[0])
        for one in ranks
        if one.activity
        and one.activity.operations
        and one.activity.operations[0].seconds >= LONG_SECONDS
    ]
    return sorted(found, key=lambda wait: -wait.operation.seconds)


def waited_for(ranks: Sequence[Rank]) -> list[Rank]:
    """Returns the ranks that other ranks wait for and that do not wait themselves.

    If ranks wait but there is no such rank, the unresponsive ranks are returned instead. They may
    have joined an operation, and then been stopped (SIGSTOP) before the operation ended.
    """
    waits = find_waits(ranks)
    wanted = set().union(*(_absent_ranks(wait, ranks) for wait in waits))
    waiting = {wait.rank.rank for wait in waits}
    found = [one for one in ranks if one.rank in wanted - waiting]
    if found or not waits:
        return found
    return [one for one in ranks if one.state == "unresponsive"]


def headline(ranks: Sequence[Rank]) -> str:
    """Summarizes the state of the job; the most important facts are first.

    Args:
        ranks: all ranks of the job.

    Returns:
        One or more sentences, without line breaks.
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
    """Describes what a rank is doing.

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
    """Returns the ranks that a waiting rank waits for.

    `wait.operation.waits_for` may be out of date. So ranks are left out if their own reports show
    that they have joined the operation by now.
    """
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
        return f"{head}: {_rate(steps)} steps/s, {_rate(rows)} rows/s.{_division(found)}"
    if collectives:
        return f"{head}: {_rate(collectives)} collectives/s, and no step has begun."
    places = sorted({one.main for one in found if one.main})
    where = f"; their main threads are in {listed(places)}" if places else ""
    return f"No rank is in a collective, and none has ended in {seconds(longest)}{where}."


def _division(activities: Sequence[Activity]) -> str:
    shares = [one.preprocessed for one in activities if one.preprocessed is not None]
    if not shares:
        return ""
    least, most = f"{min(shares):.0%}", f"{max(shares):.0%}"
    between = least if least == most else f"{least} to {most}"
    return f" Each preprocesses {between} of the rows."


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
# The version of the JSON format.
_FORMAT = 1


def live_text(ranks: Sequence[Rank], *, most: int | None = _MAX_ROWS) -> str:
    """Formats the state of the job as a headline and a table with a row for each rank.

    The table begins with the ranks that others wait for.

    Args:
        ranks: all ranks of the job.
        most: the maximum number of rows; None to show all ranks.
    """
    causes = waited_for(ranks)
    # The sort is stable: ranks with equal keys remain in rank order.
    order = sorted(ranks, key=lambda one: (one not in causes, one.state == "answered"))
    rows = [_COLUMNS, *map(_row, order[:most])]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(map(_aligned, _COLUMNS, row, widths)).rstrip() for row in rows]
    more = len(order) - len(rows) + 1
    return "\n".join([headline(ranks), "", *lines, *([f"and {more} more: --all"] if more else [])])


def live_json(address: str, ranks: Sequence[Rank]) -> str:
    """Formats the state of the job as a JSON object; docs/guide/monitoring.md lists its keys."""
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
    """Formats a number of bytes with three significant digits and a unit.

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
