"""Computes the rows of the table from the times of the rounds."""

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
    """Returns one row for each way to watch.

    Args:
        model: the name of the model.
        workers: the number of workers.
        rounds: for each way to watch, a list of the rounds. A round is a list of the times of its
            steps in seconds. The way `none` is required.
        recorded: for each way to watch, the number of inputs and collectives per step that the
            recorder has counted.
        missing: for each way to watch that could not run, the reason.

    Returns:
        The rows. If a way to watch could not run, its row contains the reason as `missing`. Other
        rows contain `recorded` and:

        - `step_ms`, `low_ms` and `high_ms`: the mean time of a step in a round, the median and the
          quartiles over the rounds.
        - `ratio`, `ratio_low` and `ratio_high`: this time divided by the time of `none` in the same
          round, the median and the quartiles over the rounds.
        - `quick_ms`: the 10th percentile of all steps. Other work on the machine affects these
          steps least.
        - `quick_ratio`: `quick_ms` divided by the `quick_ms` of `none`.
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
    """Formats the rows as a table. If a way to watch could not run, its row shows the reason."""
    return format_rows(rows, COLUMNS, format_cell)
