"""Finds workers that wait for one another: one in an exchange, the other in a collective.

Neither can go on, and each by itself only seems to wait for a slow worker.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

# What the reports call them.
SESSION = "session"
NOTICES = "notices"


@dataclass(frozen=True)
class CrossedWait:
    """A rank in an exchange that another rank has not joined, since it waits for the first.

    Attributes:
        sequence: the exchange's number.
        communicator: where the other rank waits.
        number: the number of its operation there.
        in_exchange: the first rank.
        in_operation: the other rank.
        message: the error, for users.
    """

    sequence: int
    communicator: str
    number: int
    in_exchange: int
    in_operation: int
    message: str = field(compare=False)


def crossed_waits(
    sequence: int,
    tag: str,
    joined: set[int],
    reports: Mapping[int, bytes],
    names: Mapping[int, str],
) -> set[CrossedWait]:
    """The waits that cross an exchange.

    Args:
        sequence: the exchange's number.
        tag: what it is for.
        joined: the ranks that have joined it.
        reports: what the ranks say of themselves, as JSON; of those that have answered.
        names: the ranks' workers.

    Example:
        >>> operation = {"communicator": "workers", "what": "all_gather 'x'", "number": 3}
        >>> reports = {
        ...     0: {"operations": [{"communicator": "session", "number": 7}], "queued": 0},
        ...     1: {"operations": [{**operation, "waits_for": [0]}]},
        ... }
        >>> encoded = {rank: json.dumps(report).encode() for rank, report in reports.items()}
        >>> found = crossed_waits(7, "epoch", {0}, encoded, {0: "worker 0", 1: "worker 1"})
        >>> [(one.in_exchange, one.in_operation) for one in found]
        [(0, 1)]
    """
    known = {rank: read for rank, text in reports.items() if (read := _read(text)) is not None}
    # Those that do nothing else, so that they will not join a collective by themselves.
    blocked = {
        rank
        for rank in joined & known.keys()
        if not known[rank].get("queued")
        and {one.get("communicator") for one in known[rank]["operations"]} == {SESSION}
    }
    found = set()
    for rank in known.keys() - joined:
        for one in known[rank]["operations"]:
            waits_for = blocked.intersection(one.get("waits_for") or ())
            if one.get("communicator") == SESSION or not waits_for:
                continue
            other = min(waits_for)
            message = (
                f"The workers wait for one another: {names[other]}{_place(known[other])} in the "
                f"exchange {tag!r}, which {names[rank]} has not joined, and "
                f"{names[rank]}{_place(known[rank])} in {_described(one)}, which "
                f"{names[other]} has not joined. Make the same calls in the same order on all "
                "workers."
            )
            found.add(
                CrossedWait(
                    sequence, one["communicator"], one.get("number", 0), other, rank, message
                )
            )
    return found


def _read(text: bytes) -> dict[str, Any] | None:
    report: Any
    try:
        report = json.loads(text)
    except ValueError:
        return None
    operations = report.get("operations") if isinstance(report, dict) else None
    if not isinstance(operations, list) or not all(isinstance(one, dict) for one in operations):
        return None
    return dict(report)


def _place(report: Mapping[str, Any]) -> str:
    return f", in {report['main']}," if report.get("main") else ""


def _described(operation: Mapping[str, Any]) -> str:
    what = operation.get("what", "")
    return f"a wait for notice {what!r}" if operation["communicator"] == NOTICES else str(what)
