"""Made-up flight logs, in seconds after the job's start, for the tests and the documentation."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tfdist._src.launch.flight.diagnosis import diagnose
from tfdist._src.launch.flight.findings import Diagnosis
from tfdist._src.launch.flight.merge import merge, read

START = 1_700_000_000  # 22:13:20 UTC
STACK = """Thread 0x00007f01 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 982 in run
  File "/usr/lib/python3.11/threading.py", line 1002 in _bootstrap

Current thread 0x00007f02 (most recent call first):
  File "/usr/lib/python3.11/gzip.py", line 301 in read
  File "/app/data.py", line 12 in load
  File "/venv/lib/python3.11/site-packages/keras/src/trainers/trainer.py", line 7 in fit
  File "/app/train.py", line 40 in <module>
"""


def name(rank: int) -> str:
    return f"worker {rank} (10.0.0.{rank + 1}:8470)"


def names(*ranks: int) -> list[str]:
    return [name(rank) for rank in ranks]


def ns(seconds: float) -> int:
    return round(seconds * 1e9)


def record(
    sequence: int,
    begun: float,
    ended: float | None = None,
    kind: str = "all_reduce",
    last: tuple[int, float] = (-1, 0.0),
    **changes: Any,
) -> dict[str, Any]:
    """One record; `last` is the rank that came last, and when."""
    fields = {
        "number": sequence,
        "sequence": sequence,
        "kind": kind,
        "name": "0",
        "type": "float32",
        "shape": [5],
        "tensors": 1,
        "elements": 5,
        "op": "sum",
        "root": 0,
        "shapes": "9f8e",
        "codec": "0",
        "forced_algorithm": "auto",
        "failures": 0,
        "peer": -1,
        "bytes": 20,
        "algorithm": "shm",
        "enqueued_ns": ns(begun),
        "begun_ns": ns(begun),
        "last_arrived_ns": ns(last[1]),
        "ended_ns": 0 if ended is None else ns(ended),
        "last": last[0],
        "arrivals_ns": [],
        "failed": False,
        **changes,
    }
    reduction = f" {fields['op']}" if kind == "all_reduce" else ""
    what = f"{kind} '{fields['name']}' {fields['type']}[5]{reduction}"
    return {"what": what, **fields}


def peer(rank: int, heard: float, sequence: int, **changes: Any) -> dict[str, Any]:
    fields = {"rank": rank, "heard_ns": ns(heard), "sequence": sequence, "in": None}
    fields |= {"left": False, "lost": False}
    return fields | {"clock_offset_ns": None, "clock_uncertainty_ns": None} | changes


def link(rank: int, pending: int = 0, rate: int = 0, silent_ms: int = 0) -> dict[str, int]:
    """A connection to a rank of the group."""
    amounts = {"pending_bytes": pending, "bytes_per_second": rate, "silent_ms": silent_ms}
    return {"rank": rank, "acknowledged_bytes": 9, "busy_us": 9, **amounts}


def group(
    own: int,
    records: Sequence[dict[str, Any]] = (),
    ranks: Sequence[int] = (0, 1, 2, 3),
    *,
    called: str = "workers",
    peers: Sequence[dict[str, Any]] = (),
    aborted: dict[str, Any] | None = None,
    hosts: Sequence[int] | None = None,
    links: Sequence[dict[str, int]] = (),
) -> dict[str, Any]:
    """The part of a log about a group of the job's ranks; `own`, `peers` and `links` are its ranks.

    Without `hosts`, each rank is on its own.
    """
    return {
        "name": called,
        "rank": own,
        "size": len(ranks),
        "ranks": names(*ranks),
        "hosts": list(range(len(ranks)) if hosts is None else hosts),
        "aborted": aborted,
        "queued": [],
        "peers": list(peers),
        "links": list(links),
        "records": list(records),
    }


def log(
    rank: int,
    *groups: dict[str, Any],
    written: float = 60.0,
    size: int = 4,
    reasons: Sequence[tuple[float, str, str]] = (),
    steady: float = 0.0,
    unix: float = 0.0,
    **changes: Any,
) -> dict[str, Any]:
    """A log. `reasons` are times, kinds and messages.

    Args:
        steady: by how much the host's steady clock is ahead of the seconds in the arguments: these
            are then on that clock, and only `written` is not.
        unix: by how much its Unix time is ahead.
    """
    moment = {"steady_ns": ns(written + steady), "unix_ns": ns(START + written + unix)}
    return {
        "format": 1,
        "rank": rank,
        "size": size,
        "worker": name(rank),
        "host": f"node-{rank}",
        "pid": 100 + rank,
        "program": "train.py",
        "written": START + written,
        "clock": moment,
        "reasons": [
            {"steady_ns": ns(at), "kind": kind, "communicator": "workers", "message": message}
            for at, kind, message in reasons
        ],
        "steps": 12,
        "input_since_ns": 0,
        "communicators": list(groups),
        "stacks": "",
        **changes,
    }


def write(folder: Path, *logs: dict[str, Any]) -> Path:
    """Writes the logs into a folder, after what was there is removed."""
    folder.mkdir(exist_ok=True)
    for file in folder.iterdir():
        file.unlink()
    for one in logs:
        (folder / f"flight-rank{one['rank']}.json").write_text(json.dumps(one))
    return folder


def diagnosis(folder: Path, *logs: dict[str, Any]) -> Diagnosis:
    """What is found in these logs."""
    found = read(write(folder, *logs))
    assert not found.skipped
    return diagnose(merge(found.logs))
