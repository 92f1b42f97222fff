"""Computes the rows of the table for `--faults`: the cost of each fault."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from benchmarks.all_reduce.columns import format_rows
from benchmarks.recovery.cases import Case
from benchmarks.recovery.faults import Results

FIGURES = ("detect_s", "first_step_s", "next_step_s", "steps_lost")
COLUMNS = {
    "fault": "fault",
    "workers": "workers",
    "backend": "backend",
    "respawn": "respawn",
    "rounds": "rounds",
    "failed": "failed",
    "detect_s": "detect s",
    "detect_low": "from",
    "detect_high": "to",
    "first_step_s": "first step s",
    "next_step_s": "next step s",
    "next_step_low": "from",
    "next_step_high": "to",
    "steps_lost": "steps lost",
}


def make_row(case: Case, fault: str, workers: int, results: Results) -> dict[str, Any]:
    """Returns the row of one case with one fault.

    Returns:
        The row. If training did not continue in any round, it contains the reason as `missing`.
        Otherwise, it contains the number of rounds in which training continued, and for each of
        `FIGURES` the median, the lowest and the highest value over these rounds, such as
        `detect_s`, `detect_low` and `detect_high`. A figure without a known value is left out. If
        training did not continue in some rounds, the row also contains their number as `failed`,
        and the last reason as `failure`.
    """
    row: dict[str, Any] = {"backend": case.backend, "fault": fault, "workers": workers}
    if case.respawn:
        row["respawn"] = case.respawn
    if not results.recoveries:
        return row | {"missing": results.failures[-1]}
    row["rounds"] = len(results.recoveries)
    if results.failures:
        row |= {"failed": len(results.failures), "failure": results.failures[-1]}
    for figure in FIGURES:
        found = [getattr(one, figure) for one in results.recoveries]
        values = [value for value in found if value is not None]
        if values:
            name = figure.removesuffix("_s")
            row[figure] = median(values)
            row |= {f"{name}_low": min(values), f"{name}_high": max(values)}
    return row


def format_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Formats the rows as a table. If a case failed in all rounds, its row shows the reason."""
    return format_rows(rows, COLUMNS, format_cell)


def format_cell(name: str, value: Any) -> str:
    """Formats a value of a row for the table. None becomes an empty cell."""
    if value is None:
        return ""
    if name == "steps_lost":
        return f"{value:g}"
    return f"{value:.2f}" if isinstance(value, float) else str(value)
