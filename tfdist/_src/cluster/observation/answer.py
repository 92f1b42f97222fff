"""What rank 0 tells an observer: what it knows of each rank, and the rank's own report."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tfdist._src.cluster.net.framing import Header, WireError, encode
from tfdist._src.cluster.net.printable import printable
from tfdist._src.cluster.session.reports import REPORT_LIMIT, Presence

_MAX_TEXT = 2000


@dataclass(frozen=True)
class Seen:
    """A rank as rank 0 sees it.

    Attributes:
        rank: the rank.
        worker: what messages call it.
        silence: seconds since rank 0 last heard of it; None if it is not connected.
        gone: why it is not, such as "has left the job"; "" if it is.
        report: its report; None if it did not answer in time.
    """

    rank: int
    worker: str
    silence: float | None
    gone: str
    report: dict[str, Any] | None


def encode_answer(
    workers: Sequence[str], presences: Sequence[Presence], reports: dict[int, bytes]
) -> bytes:
    """The frame to send. The reports are passed on as they came.

    Args:
        workers: what messages call each rank.
        presences: of each rank.
        reports: by rank, of those that have answered.
    """
    ranks = [
        [worker, presence.silence, presence.gone, len(reports.get(rank, b""))]
        for rank, (worker, presence) in enumerate(zip(workers, presences, strict=True))
    ]
    payload = b"".join(reports.get(rank, b"") for rank in range(len(workers)))
    return encode({"kind": "answer", "ranks": ranks}, payload)


def decode_answer(header: Header, payload: bytes) -> list[Seen]:
    """The ranks in their order.

    Raises:
        WireError: it is no answer.
    """
    ranks = header.get("ranks")
    if header["kind"] != "answer" or not isinstance(ranks, list) or not ranks:
        raise WireError("it sent no answer")
    seen: list[Seen] = []
    for entry in ranks:
        if not isinstance(entry, list) or not _is_entry(*entry[:5]):
            raise WireError("it sent a malformed answer")
        worker, silence, gone, size = entry
        if not 0 <= size <= min(len(payload), REPORT_LIMIT):
            raise WireError("it sent a malformed answer")
        report, payload = payload[:size], payload[size:]
        worker, gone = printable(worker[:_MAX_TEXT]), printable(gone[:_MAX_TEXT])
        seen.append(Seen(len(seen), worker, silence, gone, _report(report)))
    return seen


def _is_entry(*values: Any) -> bool:
    kinds = [type(value) for value in values]
    return kinds in ([str, float, str, int], [str, type(None), str, int])


def _report(text: bytes) -> dict[str, Any] | None:
    """A report, whose content may be anything."""
    if not text:
        return None
    try:
        report = json.loads(text.decode())
    except (ValueError, RecursionError):
        report = None
    return report if isinstance(report, dict) else {"error": "its report is malformed"}
