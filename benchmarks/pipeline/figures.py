"""Computes the rows of the table from the times of the rounds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from benchmarks.all_reduce.columns import format_rows
from benchmarks.pipeline.backends import BACKENDS, WHOLE, Entry
from benchmarks.step_time.figures import divide, spread
from tfdist._src.pipeline.schedules import make_schedule
from tfdist._src.pipeline.simulation import simulate

COLUMNS = {
    "backend": "backend",
    "schedule": "schedule",
    "stages": "stages",
    "microbatches": "microbatches",
    "step_ms": "median ms",
    "low_ms": "from",
    "high_ms": "to",
    "simulated_ms": "simulated ms",
    "to_simulated": "step/simulated",
    "overhead_us": "us/action",
    "speedup": "speed-up",
    "speedup_low": "from",
    "speedup_high": "to",
    "limit": "limit",
    "share": "speed-up/limit",
    "ratio": "step/torch",
    "ratio_low": "from",
    "ratio_high": "to",
    "first_s": "first s",
}

Rounds = Mapping[Entry, Sequence[float]]


def make_rows(
    stages: int,
    rounds: Rounds,
    missing: Mapping[Entry, str],
    simulated: Mapping[Entry, float],
    first: Mapping[Entry, float],
) -> list[dict[str, Any]]:
    """Returns one row for each entry.

    Args:
        stages: the number of workers of the pipelines.
        rounds: for each entry, the seconds per step in each round.
        missing: for each entry that could not run, the reason.
        simulated: for each simulated entry, the seconds per step that the simulator predicts.
        first: for each entry, the time to build the model and take the first step, in seconds.

    Returns:
        The rows. The row of an entry that could not run contains the reason as `missing`. Other
        rows contain:

        - `step_ms`, `low_ms` and `high_ms`: the time of a step, the median and the quartiles over
          the rounds.
        - `first_s`: the time to build the model and take the first step.
        - `simulated_ms`: the time of a step that the simulator predicts.
        - `to_simulated`: the measured time divided by the predicted time.
        - `overhead_us`: the difference between the measured and the predicted time, divided by the
          number of actions of a worker.
        - `speedup`: the time of one process divided by the time of the pipeline, if one process of
          the same framework was measured.
        - `limit`: the speed-up that the schedule allows; see the function `limit`.
        - `share`: `speedup` divided by `limit`.
        - `ratio`: the time divided by torch's time, if torch's pipeline was measured with the same
          schedule.

        `speedup` and `ratio` are computed in each round. The rows contain their medians and
        quartiles over the rounds.
    """
    rows: list[dict[str, Any]] = []
    for entry, times in rounds.items():
        if not times:
            continue
        row = _row(entry, stages)
        row["low_ms"], row["step_ms"], row["high_ms"] = (1e3 * t for t in spread(times))
        row["first_s"] = first[entry]
        if entry in simulated:
            row["simulated_ms"] = 1e3 * simulated[entry]
            beyond = median(times) - simulated[entry]
            row["overhead_us"] = 1e6 * beyond / actions(entry, stages)
            if simulated[entry]:
                row["to_simulated"] = median(times) / simulated[entry]
        alone = rounds.get(Entry(BACKENDS[entry.backend].alone, WHOLE, 1))
        if alone and entry.schedule != WHOLE:
            low, middle, high = spread(divide(alone, times))
            row |= {"speedup": middle, "speedup_low": low, "speedup_high": high}
            row["limit"] = limit(entry, stages)
            row["share"] = middle / row["limit"]
        peer = rounds.get(Entry(BACKENDS[entry.backend].peer, entry.schedule, entry.microbatches))
        if peer:
            low, middle, high = spread(divide(times, peer))
            row |= {"ratio": middle, "ratio_low": low, "ratio_high": high}
        rows.append(row)
    rows += [_row(entry, stages) | {"missing": why} for entry, why in missing.items()]
    return rows


def limit(entry: Entry, stages: int) -> float:
    """Returns the speed-up of a pipeline over one process that its schedule allows.

    The speed-up is less than the number of workers because of the bubbles in the schedule. This
    function assumes that there is no overhead, and that the passes F (forward), I (input gradients)
    and W (weight gradients) take the same time.
    """
    return stages * (1 - simulate(make_schedule(entry.schedule, stages, entry.microbatches)).bubble)


def actions(entry: Entry, stages: int) -> int:
    """Returns the number of actions of the worker that has the most actions in a schedule."""
    return max(map(len, make_schedule(entry.schedule, stages, entry.microbatches).actions))


def format_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Formats the rows as a table. If an entry could not run, its row shows the reason."""
    used = {name for row in rows for name in row}
    return format_rows(rows, {k: v for k, v in COLUMNS.items() if k in used}, _cell)


def _row(entry: Entry, stages: int) -> dict[str, Any]:
    in_stages = BACKENDS[entry.backend].in_stages
    return {
        "backend": entry.backend,
        "schedule": entry.schedule,
        "stages": stages if in_stages else 1,
        "microbatches": entry.microbatches,
    }


def _cell(name: str, value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.1f}" if name.endswith(("_ms", "_us", "_s")) else f"{value:.3f}"
    return str(value)
