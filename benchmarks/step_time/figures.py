"""Rows and table from the times of the rounds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median, quantiles
from typing import Any

from benchmarks.all_reduce.columns import format_rows

COLUMNS = {
    "model": "model",
    "workers": "workers",
    "backend": "backend",
    "step_ms": "median ms",
    "low_ms": "from",
    "high_ms": "to",
    "best_ms": "best ms",
    "limit": "limit",
    "efficiency": "limit/step",
    "efficiency_low": "from",
    "efficiency_high": "to",
    "peer": "peer",
    "ratio": "step/peer",
    "ratio_low": "from",
    "ratio_high": "to",
}


def make_rows(
    model: str,
    workers: int,
    rounds: Mapping[str, Sequence[float]],
    missing: Mapping[str, str],
    limits: Mapping[str, str],
    peers: Mapping[str, str],
) -> list[dict[str, Any]]:
    """One row per backend.

    Args:
        model: its name.
        workers: how many.
        rounds: for each backend its seconds per step in each round.
        missing: for each backend that could not run, why.
        limits: for each backend the one that does the same without connection.
        peers: for each backend the one that it is compared with, or "".

    Returns:
        Rows with `step_ms` (the median) between its quartiles `low_ms` and `high_ms`, and
        `best_ms`; where the limit ran, `efficiency` (limit's time / time) and, where the peer ran,
        `ratio` (time / peer's time). Both are taken round by round: the median over the rounds,
        between its quartiles.
    """
    rows: list[dict[str, Any]] = []
    for backend, times in rounds.items():
        row: dict[str, Any] = {"backend": backend, "model": model, "workers": workers}
        low, middle, high = spread(times)
        row |= {"step_ms": 1e3 * middle, "low_ms": 1e3 * low, "high_ms": 1e3 * high}
        row["best_ms"] = 1e3 * min(times)
        limit, peer = limits[backend], peers[backend]
        if limit in rounds and limit != backend:
            low, middle, high = spread(divide(rounds[limit], times))
            row |= {"limit": limit, "efficiency": middle}
            row |= {"efficiency_low": low, "efficiency_high": high}
        if peer in rounds and peer != backend:
            low, middle, high = spread(divide(times, rounds[peer]))
            row |= {"peer": peer, "ratio": middle, "ratio_low": low, "ratio_high": high}
        rows.append(row)
    for backend, reason in missing.items():
        rows.append({"backend": backend, "model": model, "workers": workers, "missing": reason})
    return rows


def format_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The rows in aligned columns; the reason in place of figures that are missing."""
    return format_rows(rows, COLUMNS, format_cell)


def divide(upper: Sequence[float], lower: Sequence[float]) -> list[float]:
    """Ratios round by round."""
    return [a / b for a, b in zip(upper, lower, strict=True)]


def spread(values: Sequence[float]) -> tuple[float, float, float]:
    """First quartile, median, third quartile."""
    low, _, high = quantiles(values, n=4, method="inclusive")
    return low, median(values), high


def format_cell(name: str, value: Any) -> str:
    """A figure as the tables show it; nothing for None."""
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.2f}" if name.endswith("_ms") else f"{value:.3f}"
    return str(value)
