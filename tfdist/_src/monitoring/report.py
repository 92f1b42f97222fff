"""The report that this process sends when an observer asks for the status of the job."""

import os
import socket
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple
from pathlib import Path
from types import FrameType
from typing import Any

from tfdist._src.cluster import Session
from tfdist._src.cluster.session.order_checks import NOTICES, SESSION
from tfdist._src.comm import tracing
from tfdist._src.comm.functions import statistics
from tfdist._src.comm.tracing import Activity
from tfdist._src.monitoring import stragglers, training

_MAX_ITEMS = 8
_MAX_LINKS = 16
_MAX_TEXT = 300
_OWN = str(Path(__file__).parents[2])
_LIBRARIES = (*{sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")}, _OWN)


def reporter(session: Session) -> Callable[[], dict[str, Any]]:
    """Returns a function that makes the report.

    Any thread may call the function, and it does not block.

    docs/guide/monitoring.md describes the report's keys.

    Args:
        session: the job's session.
    """
    ranks = {str(worker): rank for rank, worker in enumerate(session.topology.workers)}
    joined_ns = time.monotonic_ns()

    def report() -> dict[str, Any]:
        now = time.monotonic_ns()
        done = tracing.read() or Activity()
        traffic = statistics()
        communicators = stragglers.communicators(records=1)
        exchanges = list(_exchanges(session, now))
        operations = [*exchanges, *_operations(communicators, ranks, now)][:_MAX_ITEMS]
        divided, preprocessed = training.record.preprocessing()
        waited = None
        # While an operation is in progress, the worker does not wait for its input. Instead, it
        # waits in a collective that the input pipeline runs, for example at the end of the data.
        if done.input_since is not None and not operations:
            waited = max(0.0, 1e-9 * now - done.input_since)
        return {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "time": 1e-9 * now,
            "joined": 1e-9 * (now - joined_ns),
            "steps": done.steps,
            "rows": training.record.read().rows,
            "divided_rows": divided,
            "preprocessed_rows": preprocessed,
            "input": done.input + (waited or 0.0),
            "workers": done.workers,
            "network": done.network,
            "collectives": traffic.collectives,
            "shared_bytes": traffic.shared_bytes,
            "sent_bytes": traffic.sent_bytes,
            "device_bytes": traffic.device_bytes,
            "resident_bytes": _resident_bytes(),
            "operations": operations,
            "queued": sum(len(one["queued"]) for one in communicators),
            "idle": None if exchanges else _idle(communicators, now),
            "input_wait": waited,
            "main": _main_thread(),
            "links": _links(communicators, ranks),
            "leader": stragglers.leader(communicators, ranks, session.rank),
        }

    return report


def _operations(
    communicators: Sequence[dict[str, Any]], ranks: dict[str, int], now: int
) -> Iterator[dict[str, Any]]:
    """Yields the collectives and messages that this process has begun and that have not ended."""
    for one in communicators:
        for record in one["records"]:
            if not record["ended_ns"]:
                missing = [one["ranks"][peer] for peer in _missing(one, record)]
                yield {
                    "communicator": one["name"][:_MAX_TEXT],
                    "what": record["what"][:_MAX_TEXT],
                    "number": record["sequence"],
                    "seconds": max(0.0, 1e-9 * (now - record["begun_ns"])),
                    "waits_for": [ranks[name] for name in missing if name in ranks][:_MAX_ITEMS],
                    "missing": len(missing),
                }


def _exchanges(session: Session, now: int) -> Iterator[dict[str, Any]]:
    """Yields the exchange that this process is in, and the notice from rank 0 for which it waits.

    The reports of the other ranks show which of these ranks have not joined the exchange.
    """
    for one in session.awaited:
        yield {
            "communicator": NOTICES if one.is_notice else SESSION,
            "what": one.what[:_MAX_TEXT],
            "number": one.sequence,
            "seconds": max(0.0, 1e-9 * (now - one.since_ns)),
            "waits_for": [0] if one.is_notice else None,
            "missing": int(one.is_notice),
        }


def _missing(communicator: dict[str, Any], record: dict[str, Any]) -> list[int]:
    """Returns the ranks that have not joined an operation, according to their last messages."""
    if record["peer"] >= 0:
        return [record["peer"]]
    peers = communicator["peers"]
    return [peer["rank"] for peer in peers if peer["sequence"] < record["sequence"]]


def _links(communicators: Sequence[dict[str, Any]], ranks: dict[str, int]) -> list[tuple[int, ...]]:
    """The connections to other hosts that were busy for the longest time, by rank."""
    found = stragglers.by_rank(communicators, ranks)
    busiest = sorted(found, key=lambda rank: -found[rank].busy_us)[:_MAX_LINKS]
    return [(rank, *astuple(found[rank])) for rank in busiest]


def _idle(communicators: Sequence[dict[str, Any]], now: int) -> float | None:
    """Seconds since the last operation ended; None during an operation, or before the first."""
    ends = [record["ended_ns"] for one in communicators for record in one["records"]]
    return max(0.0, 1e-9 * (now - max(ends))) if ends and all(ends) else None


def _resident_bytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _main_thread() -> str:
    """The main thread's innermost call in the user's program, or else in any code."""
    innermost = sys._current_frames().get(threading.main_thread().ident or 0)
    frame: FrameType | None = innermost
    while frame is not None and frame.f_code.co_filename.startswith((*_LIBRARIES, "<")):
        frame = frame.f_back
    shown = frame or innermost
    if shown is None:
        return ""
    code = shown.f_code
    return f"{code.co_name} ({code.co_filename}:{shown.f_lineno})"[-_MAX_TEXT:]
