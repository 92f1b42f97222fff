"""Computes rows and tables from the times of the rounds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from statistics import mean, quantiles
from typing import Any

from benchmarks.all_reduce.columns import format_rows
from benchmarks.step_time.figures import divide, format_cell, spread

COLUMNS = {
    "model": "model",
    "workers": "workers",
    "watch": "watch",
    "step_ms": "median ms",
    "low_ms": "from",
    "high_ms": "to",
    "quick_ms": "quick ms",
    "ratio": "step/none",
    "ratio_low": "from",
    "ratio_high": "to",
    "quick_ratio": "quick/quick",
    "recorded": "recorded",
}


def make_rows(
    model: str,
    workers: int,
    rounds: Mapping[str, Sequence[Sequence[float]]],
    recorded: Mapping[str, float],
    missing: Mapping[str, str],
) -> list[dict[str, Any]]:
    """Returns one row per way to watch.

    Args:
        model: the model's name.
        workers: the number of workers.
        rounds: for each way to watch, including `none`, the seconds of each step in each round.
        recorded: for each way to watch, the number of recorded inputs and collectives per step.
        missing: for each way to watch that could not run, the reason.

    Returns:
        Rows with `step_ms` (the median) and its quartiles `low_ms` and `high_ms`, and `ratio`, the
        median over the rounds of the time divided by that of `none`, and its quartiles. `quick_ms`
        is the 10th percentile of all single steps, which other work on the machine disturbs least;
        `quick_ratio` is its ratio to that of `none`.
    """
    rows: list[dict[str, Any]] = []
    quick = {watch: quantiles(chain(*times), n=10)[0] for watch, times in rounds.items()}
    means = {watch: [mean(times) for times in all_times] for watch, all_times in rounds.items()}
    for watch, times in means.items():
        row: dict[str, Any] = {"model": model, "workers": workers, "watch": watch}
        low, middle, high = spread(times)
        row |= {"step_ms": 1e3 * middle, "low_ms": 1e3 * low, "high_ms": 1e3 * high}
        low, middle, high = spread(divide(times, means["none"]))
        row |= {"ratio": middle, "ratio_low": low, "ratio_high": high}
        row |= {"quick_ms": 1e3 * quick[watch], "quick_ratio": quick[watch] / quick["none"]}
        rows.append({**row, "recorded": recorded[watch]})
    for watch, reason in missing.items():
        rows.append({"model": model, "workers": workers, "watch": watch, "missing": reason})
    return rows


def format_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Formats the rows in aligned columns; a row without figures shows the reason."""
    return format_rows(rows, COLUMNS, format_cell)
