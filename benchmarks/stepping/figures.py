"""Rows and table from the times of the rounds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median, quantiles
from typing import Any

COLUMNS = {
    "model": "model",
    "workers": "workers",
    "backend": "backend",
    "step_ms": "median ms",
    "best_ms": "best ms",
    "peer": "peer",
    "ratio": "ratio",
    "ratio_low": "from",
    "ratio_high": "to",
}


def make_rows(
    model: str,
    workers: int,
    rounds: Mapping[str, Sequence[float]],
    missing: Mapping[str, str],
    peer: str,
) -> list[dict[str, Any]]:
    """One row per backend.

    Args:
        model: its name.
        workers: how many.
        rounds: for each backend its seconds per step in each round.
        missing: for each backend that could not run, why.
        peer: the backend that the others are compared with, round by round.

    Returns:
        Rows with `step_ms` (the median), `best_ms` and, where the peer ran, `ratio` (the median
        over the rounds of time / peer's time) between its quartiles `ratio_low` and `ratio_high`.
    """
    rows: list[dict[str, Any]] = []
    for backend, times in rounds.items():
        row: dict[str, Any] = {"backend": backend, "model": model, "workers": workers}
        row |= {"step_ms": 1e3 * median(times), "best_ms": 1e3 * min(times)}
        if peer in rounds and backend != peer:
            ratios = [mine / its for mine, its in zip(times, rounds[peer], strict=True)]
            low, middle, high = quantiles(ratios, n=4, method="inclusive")
            row |= {"peer": peer, "ratio": middle, "ratio_low": low, "ratio_high": high}
        rows.append(row)
    for backend, reason in missing.items():
        rows.append({"backend": backend, "model": model, "workers": workers, "missing": reason})
    return rows


def format_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The rows in aligned columns; the reason in place of figures that are missing."""
    lines = [list(COLUMNS.values())]
    for row in rows:
        lines.append([_cell(name, row.get(name, "")) for name in COLUMNS])
    widths = [max(len(line[i]) for line in lines) for i in range(len(COLUMNS))]
    texts = [
        "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    ]
    for i, row in enumerate(rows, start=1):
        if "missing" in row:
            texts[i] += f"  missing: {row['missing']}"
    return "\n".join(texts)


def _cell(name: str, value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.2f}" if name.endswith("_ms") else f"{value:.3f}"
    return str(value)
