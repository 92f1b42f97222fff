"""Computes rows and tables of the costs of faults."""

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
    """Returns the row of a case with a fault.

    Returns:
        The median over the rounds of each of `FIGURES`, with the lowest and the highest value as
        `detect_low` and so on; unknown figures are left out. If training has not continued in any
        round, `missing` contains the reason.
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
    """Formats the rows in aligned columns; a row without figures shows the reason."""
    return format_rows(rows, COLUMNS, format_cell)


def format_cell(name: str, value: Any) -> str:
    """Formats a figure for the table; "" for None."""
    if value is None:
        return ""
    if name == "steps_lost":
        return f"{value:g}"
    return f"{value:.2f}" if isinstance(value, float) else str(value)
