"""Computes rows and tables from the trainings of the codecs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import accumulate
from statistics import median
from typing import Any

from benchmarks.all_reduce.columns import format_rows
from benchmarks.compression.rounds import WARM_UP_STEPS, Course
from benchmarks.compression.speed import Speed
from benchmarks.compression.turn import Turn

COLUMNS = {
    "rate": "rate",
    "codec": "codec",
    "step_ms": "median ms",
    "best_ms": "best ms",
    "ratio": "none/step",
    "wire_bytes": "wire MB",
    "encode_gbs": "encode",
    "decode_gbs": "decode",
    "loss": "loss",
    "chosen": "chosen",
}


def make_row(
    course: Course, reference: Course | None, steps: int, speed: Speed, names: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns the row of one codec at one rate.

    Args:
        course: the codec's training.
        reference: the training without compression in the same rounds; None if it is not measured.
        steps: the number of steps in each round.
        speed: the encoding speed of the codec.
        names: columns that describe the measurement.

    Returns:
        The names, `step_ms` (the median of the rounds), `best_ms`, `ratio` (the median over the
        rounds of the reference's time divided by the codec's time; None without a reference),
        `wire_bytes` (per step and worker, the median of the rounds), `encode_gbs`, `decode_gbs`,
        `loss` (after all `steps`; None if it is not finite) and `chosen`. `seconds` and `losses`
        describe the course of the loss, before the first round and after each round; the seconds
        are the total time of this codec's rounds so far. If the codec failed, the names and
        `missing`.
    """
    if course.missing or not course.warm_up or not course.turns:
        return {**names, "missing": course.missing or "took no steps"}
    turns = course.turns
    times = [1e3 * turn.seconds / steps for turn in turns]
    all_turns: list[Turn] = [course.warm_up, *turns]
    losses = [turn.loss if math.isfinite(turn.loss) else None for turn in all_turns]
    return {
        **names,
        "step_ms": median(times),
        "best_ms": min(times),
        "ratio": _ratio(course, reference),
        "wire_bytes": round(median(turn.sent_bytes for turn in turns) / steps),
        "encode_gbs": speed.encode_gbs,
        "decode_gbs": speed.decode_gbs,
        "loss": losses[-1],
        "chosen": turns[-1].chosen,
        "steps": WARM_UP_STEPS + steps * len(turns),
        "seconds": list(accumulate((turn.seconds for turn in turns), initial=0.0)),
        "losses": losses,
    }


def format_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Formats the rows in aligned columns; a row without figures shows the reason."""
    return format_rows(rows, COLUMNS, _cell)


def _ratio(course: Course, reference: Course | None) -> float | None:
    if not reference or reference.missing:
        return None
    pairs = zip(course.turns, reference.turns, strict=True)
    return median(its.seconds / own.seconds for own, its in pairs)


def _cell(name: str, value: Any) -> str:
    if value is None:
        return "-"
    if name == "wire_bytes":
        return f"{value / 1e6:.3f}"
    if isinstance(value, float):
        return {"loss": f"{value:.4f}", "ratio": f"{value:.3f}"}.get(name, f"{value:.2f}")
    return str(value)
