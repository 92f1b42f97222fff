"""Formats a diagnosis of flight logs, as text or as JSON."""

import json
from collections.abc import Iterator
from dataclasses import asdict

from tfdist._src.launch.flight.findings import (
    Cycle,
    Diagnosis,
    Failure,
    Finding,
    LastOperation,
    LastReport,
    Mismatch,
    MissingWorker,
    MissingWorkers,
    Operation,
    State,
    Transfer,
    UnknownParticipants,
    date,
    describe_backlogs,
    listed,
    moment,
    seconds,
    workers,
)
from tfdist._src.launch.flight.merge import Folder
from tfdist._src.launch.flight.step_communication import describe

_MAX_LINES = 16
_NO_LOG = (
    "it was killed or stopped, its host has died, it could not write, or its log is not in this "
    "folder"
)
_NO_LOGS = (
    "they were killed or stopped, their hosts have died, they could not write, or their logs are "
    "not in this folder"
)
_UNKNOWN = "It has left no log, and no other log mentions it."


def sentences(finding: Finding) -> list[str]:
    """Describes a finding: the first line is a summary, and further lines contain details.

    Example:
        >>> sentences(Failure("worker 1 (b:1) is lost.", ("worker 0 (a:1)",), ("workers",), None))
        ["worker 1 (b:1) is lost. This ended 'workers', says worker 0 (a:1)."]
    """
    match finding:
        case Mismatch():
            return [_mismatch(finding)]
        case Cycle():
            return _cycle(finding)
        case Failure():
            return [_failure(finding)]
        case MissingWorkers():
            return _missing_workers(finding)
        case Transfer():
            return _transfer(finding)
        case UnknownParticipants():
            return [_unknown_participants(finding)]


def operation(of: Operation) -> str:
    """Formats an operation, as in "all_reduce '0' float32[3] sum (number 17 of 'workers')"."""
    return f"{of.what} (number {of.number} of '{of.communicator}')"


def _mismatch(finding: Mismatch) -> str:
    most, *others = finding.calls
    place = f"(number {finding.number} of '{finding.communicator}')"
    if len(others) == 1 and len(others[0].workers) < len(most.workers):
        few = others[0]
        many = len(few.workers) > 1
        return (
            f"{workers(few.workers)} called another collective than the others: "
            f"{'they are' if many else 'it is'} in {few.what} {place}, where "
            f"{workers(most.workers)} are in {most.what}. {_differs(finding)}"
        )
    calls = [f"{workers(c.workers)} {_are(c.workers)} in {c.what}" for c in finding.calls]
    return f"The workers called different collectives {place}: {listed(calls)}. {_differs(finding)}"


def _differs(finding: Mismatch) -> str:
    return (
        f"They differ in {listed(finding.differs)}. Run one program, with the same arguments and "
        f"data, on all workers."
    )


def _cycle(finding: Cycle) -> list[str]:
    names = [link.worker for link in finding.links]
    shown = [
        f"{link.worker} waits for {link.waits_for} in {operation(link.operation)}."
        for link in finding.links[:_MAX_LINES]
    ]
    more = [f"and {len(names) - _MAX_LINES} more"] if len(names) > _MAX_LINES else []
    return [
        f"{workers(names)} wait for one another in a cycle, and none can proceed:",
        *shown,
        *more,
    ]


def _failure(finding: Failure) -> str:
    ended = listed([f"'{name}'" for name in finding.communicators]) or "the job"
    time = "" if finding.time is None else f" at {moment(finding.time)}"
    say = "says" if len(finding.workers) == 1 else "say"
    return f"{finding.message} This ended {ended}{time}, {say} {workers(finding.workers)}."


def _missing_workers(finding: MissingWorkers) -> list[str]:
    if finding.is_message:
        return [_message(finding)]
    names = [one.worker for one in finding.absent]
    waited = _waited(finding)
    many = len(finding.waiting) > 1
    who = "the others" if finding.all_others and many else workers(finding.waiting)
    have = f"{who} {'have' if many else 'has'} waited"
    joined = f"joined {operation(finding.operation)}"
    if len(names) == 1:
        one = finding.absent[0]
        head = (
            f"{names[0]} {joined} only after the others had given up: they had waited {waited}."
            if one.late
            else f"{names[0]} has not {joined}: {have} for it {waited}."
        )
        return [" ".join([head, *_details(one)])]
    head = f"{workers(names)} have not {joined}: {have} for them {waited}."
    lines = [f"{one.worker}: {' '.join(_details(one))}" for one in finding.absent[:_MAX_LINES]]
    return [
        head,
        *lines,
        *([f"and {len(names) - _MAX_LINES} more"] if len(names) > _MAX_LINES else []),
    ]


def _message(finding: MissingWorkers) -> str:
    one = finding.absent[0]
    other = "receive" if finding.operation.what.startswith("send") else "send"
    shown = f": its log shows no matching {other}" if one.has_communicator else ""
    if finding.operation.what.startswith("notice"):
        shown = ": it has not posted it"
    head = (
        f"{workers(finding.waiting)} has waited for {one.worker} in "
        f"{operation(finding.operation)} {_waited(finding)}{shown}."
    )
    return " ".join([head, *_details(one)])


def _waited(finding: MissingWorkers) -> str:
    return f"for {seconds(finding.seconds)} (since {moment(finding.time)})"


def _details(one: MissingWorker) -> list[str]:
    """Returns sentences about the state of a worker that others wait for."""
    parts = [f"It runs on {one.host}."] if one.host else []
    if one.waits:
        link = one.waits[0]
        parts.append(f"It is waiting for {link.waits_for} in {operation(link.operation)}.")
    elif one.last is not None and not one.late:
        parts.append(_last(one.last))
    if one.has_log and not one.has_communicator:
        parts.append("Its log does not show the communicator: it closed it or never created it.")
    if one.input_seconds is not None:
        parts.append(f"It had waited {seconds(one.input_seconds)} for its next batch.")
    if one.frames:
        parts.append(f"Its Python main thread was in {frames(one.frames)}.")
    if one.heard is not None and (one.heard.left or one.heard.lost or not one.has_log):
        parts += _heard(one.heard, one.has_log)
    elif not one.has_log:
        parts.append(_UNKNOWN)
    return parts


def _last(one: LastOperation) -> str:
    was = f"Its last operation was {operation(one.operation)}"
    match one.state:
        case "ended":
            return f"{was}, ended {seconds(one.seconds)} before its log was written."
        case "failed":
            return f"{was}, which failed {seconds(one.seconds)} before its log was written."
        case _:
            return f"{was}, in which it is waiting."


def _heard(heard: LastReport, has_log: bool) -> list[str]:
    parts = []
    if heard.left:
        parts.append("It had left the group: its program had ended, or had closed it.")
    if heard.lost:
        parts.append("It counts as lost.")
    if not has_log:
        why = "" if heard.left else f": {_NO_LOG}"
        parts.append(f"It has left no log{why}; {_heard_last(heard)}.")
    return parts


def _heard_last(heard: LastReport) -> str:
    return (
        f"{heard.by} last heard from it at {moment(heard.time)}, when it was in "
        f"{heard.inside or 'no operation'} and had joined number {heard.number}"
    )


def frames(found: tuple[str, ...]) -> str:
    """Joins the descriptions of nested calls; the innermost call must be first."""
    return ", called by ".join(found)


def _transfer(finding: Transfer) -> list[str]:
    head = (
        f"All have joined {operation(finding.operation)}, but {workers(finding.waiting)} "
        f"{_are(finding.waiting)} still in it after {seconds(finding.seconds)} (since "
        f"{moment(finding.time)}): the transfer is slow or stuck."
    )
    if finding.backlogs:
        head += f" {describe_backlogs(finding.backlogs)}"
    silent = finding.silent
    if len(silent) < 2:
        for one in silent:
            about = _heard(one.heard, has_log=False) if one.heard else [_UNKNOWN]
            head = " ".join([head, f"{one.worker}:", *about])
        return [head]
    names = [one.worker for one in silent]
    lines = [
        f"{one.worker}: {_heard_last(one.heard) if one.heard else 'no other log mentions it'}."
        for one in silent[:_MAX_LINES]
    ]
    more = [f"and {len(names) - _MAX_LINES} more"] if len(names) > _MAX_LINES else []
    return [f"{head} {workers(names)} have left no logs: {_NO_LOGS}.", *lines, *more]


def _unknown_participants(finding: UnknownParticipants) -> str:
    logs = "logs do" if len(finding.workers) > 1 else "log does"
    return (
        f"{workers(finding.waiting)} {_are(finding.waiting)} in {operation(finding.operation)} "
        f"since {moment(finding.time)}, for {seconds(finding.seconds)}. It is "
        f"unknown whether {workers(finding.workers)} joined it: the {logs} not cover that time."
    )


def _are(names: tuple[str, ...]) -> str:
    return "are" if len(names) > 1 else "is"


_MAX_ROWS = 16
# If two logs were written more than this number of seconds apart, they are probably not about the
# same failure.
_OLD = 60
# The version of the JSON format.
_FORMAT = 1


def to_text(diagnosis: Diagnosis, folder: Folder) -> str:
    """Formats the diagnosis as text, with the most important facts first."""
    return "\n".join(
        [
            *_head(diagnosis, folder),
            *_findings(diagnosis),
            *_totals(diagnosis),
            *describe(diagnosis.step_communication),
            *_workers(diagnosis),
        ]
    )


def to_json(diagnosis: Diagnosis, folder: Folder) -> str:
    """Formats the diagnosis as a JSON object; docs/guide/monitoring.md lists its keys."""
    findings = [
        {"kind": finding.kind, "text": " ".join(sentences(finding)), **asdict(finding)}
        for finding in diagnosis.findings
    ]
    whole = {
        "format": _FORMAT,
        "folder": str(folder.path),
        "skipped": folder.skipped,
        **asdict(diagnosis),
        "findings": findings,
    }
    return json.dumps(whole, indent=2)


def _head(diagnosis: Diagnosis, folder: Folder) -> Iterator[str]:
    written = sorted(worker.written for worker in diagnosis.workers)
    yield (
        f"Flight logs of {len(written)} of {diagnosis.size} workers in {folder.path}, written "
        f"{date(written[0])} {moment(written[0])} to {moment(written[-1])}."
    )
    if diagnosis.without_log:
        yield f"No log of {workers(diagnosis.without_log)}."
    if apart := [worker.worker for worker in diagnosis.workers if worker.clock == "unix"]:
        yield f"By Unix time alone, since their clocks were not compared: {workers(apart)}."
    if old := [one.worker for one in diagnosis.workers if written[-1] - one.written > _OLD]:
        yield f"Older than the newest by over a minute, perhaps of an earlier run: {workers(old)}."
    yield from (f"Skipped {line}." for line in folder.skipped)


def _findings(diagnosis: Diagnosis) -> Iterator[str]:
    yield "\nWhat happened:"
    if not diagnosis.findings:
        yield "  Nothing explains a failure: no error, and no wait of a second or more."
    for number, finding in enumerate(diagnosis.findings, start=1):
        first, *details = sentences(finding)
        yield f"  {number}. {first}"
        yield from (f"     - {line}" for line in details)


def _totals(diagnosis: Diagnosis) -> Iterator[str]:
    yield "\nWaits in the recorded operations:"
    if not diagnosis.totals:
        yield "  No worker waited for another."
        return
    rows = [
        (total.worker, seconds(total.waited_for), seconds(total.waited))
        for total in diagnosis.totals[:_MAX_ROWS]
    ]
    table = [("worker", "others waited for it", "it waited"), *rows]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for name, waited_for, waited in table:
        yield f"  {name:<{widths[0]}}  {waited_for:>{widths[1]}}  {waited:>{widths[2]}}"
    if (more := len(diagnosis.totals) - _MAX_ROWS) > 0:
        yield f"  and {more} more"


def _workers(diagnosis: Diagnosis) -> Iterator[str]:
    yield "\nWhat each worker did last:"
    for worker in diagnosis.workers:
        yield f"  {worker.worker}, process {worker.pid} ({worker.program}) on {worker.host}:"
        yield f"    {'; '.join(map(_last_operation, worker.last)) or 'no collective or message'}"
        if worker.input_seconds is not None:
            yield f"    waits for its next batch for {seconds(worker.input_seconds)}"
        if worker.frames:
            yield f"    in {frames(worker.frames)}"
        yield f"    {_written(worker)}"


def _last_operation(one: LastOperation) -> str:
    match one.state:
        case "waiting":
            return f"in {operation(one.operation)} for {seconds(one.seconds)}"
        case state:
            return f"{operation(one.operation)} {state} {seconds(one.seconds)} before the log"


def _written(worker: State) -> str:
    steps = f"{worker.steps} steps begun; " if worker.steps else ""
    if not worker.reasons:
        return f"{steps}log written {moment(worker.written)}"
    reason = worker.reasons[-1]
    message = f": {reason.message}" if reason.message else ""
    return f"{steps}log written {moment(worker.written)} ({reason.kind}{message})"
