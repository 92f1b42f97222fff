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
    "feature": "feature",
    "step_ms": "median ms",
    "quick_ms": "quick ms",
    "ratio": "step/none",
    "ratio_low": "from",
    "ratio_high": "to",
    "quick_ratio": "quick/quick",
    "cpu_ms": "cpu ms",
    "cpu_ratio": "cpu/none",
    "cpu_low": "from",
    "cpu_high": "to",
}


def make_rows(
    model: str,
    rounds: Mapping[str, Sequence[Sequence[float]]],
    used: Mapping[str, Sequence[float]],
) -> list[dict[str, Any]]:
    """Returns one row per feature.

    Args:
        model: the model's name.
        rounds: for each feature, including `none`, the seconds of each step in each round.
        used: for each feature, the CPU seconds per step in each round.

    Returns:
        Rows with `step_ms`, the median over the rounds, and `ratio`, the median over the rounds of
        the time divided by that of `none`, and its quartiles. `quick_ms` is the 10th percentile of
        all single steps, which other work on the machine disturbs least; `quick_ratio` is its ratio
        to that of `none`. `cpu_ms` and `cpu_ratio` are like `step_ms` and `ratio`, for CPU time.
    """
    rows: list[dict[str, Any]] = []
    quick = {feature: quantiles(chain(*times), n=10)[0] for feature, times in rounds.items()}
    means = {feature: [mean(times) for times in all_times] for feature, all_times in rounds.items()}
    for feature, times in means.items():
        _, middle, _ = spread(times)
        row = {"model": model, "feature": feature, "step_ms": 1e3 * middle}
        low, middle, high = spread(divide(times, means["none"]))
        row |= {"ratio": middle, "ratio_low": low, "ratio_high": high}
        row |= {"quick_ms": 1e3 * quick[feature], "quick_ratio": quick[feature] / quick["none"]}
        low, middle, high = spread(divide(used[feature], used["none"]))
        row |= {"cpu_ratio": middle, "cpu_low": low, "cpu_high": high}
        rows.append(row | {"cpu_ms": 1e3 * spread(used[feature])[1]})
    return rows


def format_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Formats the rows in aligned columns."""
    return format_rows(rows, COLUMNS, format_cell)
