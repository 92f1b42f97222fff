"""Computes the rows of the table from the times of the rounds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from benchmarks.all_reduce.columns import align
from benchmarks.all_reduce.rounds import Times
from benchmarks.all_reduce.sizes import format_size

COPIES = ("memcpy",)


def make_rows(
    ranks: int, size: int, times: Mapping[str, Times], cores_ns: float | None
) -> list[dict[str, Any]]:
    """Returns one row for each backend.

    Args:
        ranks: the number of ranks.
        size: the number of bytes that were reduced.
        times: the measured times by backend.
        cores_ns: the latency between two cores before the rounds, in nanoseconds; None if unknown.

    Returns:
        The rows. Each contains `backend`, `ranks`, `bytes` and `cores_ns`, and:

        - `seconds`: the time of one reduction, the median over the rounds.
        - `busbw_gbps`: the bus bandwidth at this time, in 10^9 bytes per second.
        - `best_gbps`: the bus bandwidth in the fastest round.
        - `wrong`: the number of wrong elements.
        - `ratio`: the backend's bus bandwidth divided by the bus bandwidth of `native`, or of the
          first backend if `native` is missing. This is computed in each round; the row contains
          the median over the rounds.
    """
    reference = "native" if "native" in times else next(iter(times), "")
    rows = []
    for backend, own in times.items():
        seconds = median(own.seconds)
        moved = bus_bytes(backend, ranks, size)
        scale = moved / bus_bytes(reference, ranks, size)
        pairs = zip(own.seconds, times[reference].seconds, strict=True)
        rows.append(
            {
                "backend": backend,
                "ranks": ranks,
                "bytes": size,
                "seconds": seconds,
                "busbw_gbps": moved / seconds / 1e9,
                "best_gbps": moved / min(own.seconds) / 1e9,
                "wrong": own.wrong,
                "ratio": median(scale * its / mine for mine, its in pairs),
                "cores_ns": cores_ns,
            }
        )
    return rows


def bus_bytes(backend: str, ranks: int, size: int) -> float:
    """Returns the number of bytes from which the bus bandwidth is computed.

    For an all-reduce on n ranks, this is 2 (n - 1) / n times the size, as in nccl-tests: with any
    algorithm, each rank must send at least this many bytes. For a copy, it is the size.
    """
    return float(size) if backend in COPIES else size * 2 * (ranks - 1) / ranks


def format_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Formats rows with the same number of ranks as a table, like the output of nccl-tests."""
    lines = [
        ["size", "backend", "time us", "algbw", "busbw", "best", "#wrong", "ratio", "cores ns"]
    ]
    for row in rows:
        if "missing" not in row:
            lines.append(
                [
                    format_size(row["bytes"]),
                    row["backend"],
                    f"{row['seconds'] * 1e6:.{2 if row['seconds'] < 1e-4 else 0}f}",
                    f"{row['bytes'] / row['seconds'] / 1e9:.3g}",
                    f"{row['busbw_gbps']:.3g}",
                    f"{row['best_gbps']:.3g}",
                    str(row["wrong"]),
                    f"{row['ratio']:.3g}",
                    "" if row["cores_ns"] is None else f"{row['cores_ns']:.0f}",
                ]
            )
    texts = []
    for i, text in enumerate(align(lines)):
        if i and lines[i][0] != lines[i - 1][0]:
            texts.append("")
        texts.append(text)
    for row in rows:
        if "missing" in row:
            texts += ["", f"{row['backend']} is missing: {row['missing']}"]
    return "\n".join(texts)
