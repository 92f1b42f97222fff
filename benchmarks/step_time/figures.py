"""Computes the rows of the table from the times of the rounds."""

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
    """Returns one row for each backend.

    Args:
        model: the name of the model.
        workers: the number of workers.
        rounds: for each backend that did not fail, the seconds per step in each round.
        missing: for each backend that failed, the reason.
        limits: for each backend, its limit: the backend that does the same without communication.
        peers: for each backend, its peer: another way to train the same model, or "".

    Returns:
        The rows. The row of a failed backend contains the reason as `missing`. Other rows contain:

        - `step_ms`, `low_ms` and `high_ms`: the time of a step, the median and the quartiles over
          the rounds.
        - `best_ms`: the time of a step in the fastest round.
        - `efficiency`: the limit's time divided by the backend's time, if the limit was measured.
        - `ratio`: the backend's time divided by the peer's time, if the peer was measured.

        `efficiency` and `ratio` are computed in each round. The rows contain their medians and
        quartiles over the rounds.
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
    """Formats the rows as a table. If a backend failed, its row shows the reason."""
    return format_rows(rows, COLUMNS, format_cell)


def divide(upper: Sequence[float], lower: Sequence[float]) -> list[float]:
    """Divides the values of each round by other values of the same round."""
    return [a / b for a, b in zip(upper, lower, strict=True)]


def spread(values: Sequence[float]) -> tuple[float, float, float]:
    """Returns the first quartile, the median and the third quartile."""
    low, _, high = quantiles(values, n=4, method="inclusive")
    return low, median(values), high


def format_cell(name: str, value: Any) -> str:
    """Formats a value of a row for the table. None becomes an empty cell."""
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.2f}" if name.endswith("_ms") else f"{value:.3f}"
    return str(value)
