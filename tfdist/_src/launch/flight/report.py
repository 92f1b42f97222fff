"""A diagnosis as text for people, and as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict

from tfdist._src.launch.flight.findings import Diagnosis, Last, State
from tfdist._src.launch.flight.folder import Folder
from tfdist._src.launch.flight.sentences import frames, operation, sentences
from tfdist._src.launch.flight.step_communication import describe
from tfdist._src.launch.flight.words import date, moment, seconds, workers

_MOST_ROWS = 16
# Seconds between logs that are unlikely to be of one failure.
_OLD = 60
# Of the keys of the JSON object.
_FORMAT = 1


def to_text(diagnosis: Diagnosis, folder: Folder) -> str:
    """The report, most important first."""
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
    """The same as one JSON object; docs/monitoring.md lists its keys."""
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
        yield "  Nothing that explains a failure: no error, and no wait of a second or more."
    for number, finding in enumerate(diagnosis.findings, start=1):
        first, *details = sentences(finding)
        yield f"  {number}. {first}"
        yield from (f"     - {line}" for line in details)


def _totals(diagnosis: Diagnosis) -> Iterator[str]:
    yield "\nWaits in the recorded operations:"
    if not diagnosis.totals:
        yield "  None has waited for another one."
        return
    rows = [
        (total.worker, seconds(total.waited_for), seconds(total.waited))
        for total in diagnosis.totals[:_MOST_ROWS]
    ]
    table = [("worker", "others waited for it", "it waited"), *rows]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for name, waited_for, waited in table:
        yield f"  {name:<{widths[0]}}  {waited_for:>{widths[1]}}  {waited:>{widths[2]}}"
    if (more := len(diagnosis.totals) - _MOST_ROWS) > 0:
        yield f"  and {more} more"


def _workers(diagnosis: Diagnosis) -> Iterator[str]:
    yield "\nWhat each worker did last:"
    for worker in diagnosis.workers:
        yield f"  {worker.worker}, process {worker.pid} ({worker.program}) on {worker.host}:"
        yield f"    {'; '.join(map(_last, worker.last)) or 'no collective or message'}"
        if worker.input_seconds is not None:
            yield f"    waits for its next batch for {seconds(worker.input_seconds)}"
        if worker.frames:
            yield f"    in {frames(worker.frames)}"
        yield f"    {_written(worker)}"


def _last(one: Last) -> str:
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
