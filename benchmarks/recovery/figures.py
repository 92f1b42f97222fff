"""Computes the rows of the table for `--features` from the times of the rounds."""

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
    """Returns one row for each feature.

    Args:
        model: the name of the model.
        rounds: for each feature, a list of the rounds. A round is a list of the times of its steps
            in seconds. The feature `none` is required.
        used: for each feature, a list of the CPU seconds per step in each round.

    Returns:
        The rows. Each contains:

        - `step_ms`: the mean time of a step in a round, the median over the rounds.
        - `ratio`, `ratio_low` and `ratio_high`: this time divided by the time of `none` in the same
          round, the median and the quartiles over the rounds.
        - `quick_ms`: the 10th percentile of all steps. Other work on the machine affects these
          steps least.
        - `quick_ratio`: `quick_ms` divided by the `quick_ms` of `none`.
        - `cpu_ms`, `cpu_ratio`, `cpu_low` and `cpu_high`: the same as `step_ms`, `ratio` and so on,
          but for the CPU time.
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
    """Formats the rows as a table."""
    return format_rows(rows, COLUMNS, format_cell)
