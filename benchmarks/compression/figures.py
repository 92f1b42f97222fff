"""Computes the rows of the table from the measurements of the codecs."""

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
        course: the training run with the codec.
        reference: the training run without compression in the same rounds; None if there is none.
        steps: the number of steps in each round.
        speed: the encoding speed of the codec.
        names: values that identify the measurement, by column name. The row contains them, too.

    Returns:
        The row. If the codec failed, it contains `names`, and the reason as `missing`. Otherwise,
        it contains `names` and:

        - `step_ms`: the time of a step, the median over the rounds.
        - `best_ms`: the time of a step in the fastest round.
        - `ratio`: the reference's time divided by the codec's time, the median over the rounds;
          None without a reference.
        - `wire_bytes`: the bytes that a worker sends per step, the median over the rounds.
        - `encode_gbs` and `decode_gbs`: the fields of `speed`.
        - `steps`: the total number of steps, including the steps before the first round.
        - `loss`: the loss after all steps; None if it is not finite.
        - `losses` and `seconds`: the loss before the first round and after each round, and the
          total time of the codec's rounds up to then.
        - `chosen`: the codec in use after the last round.
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
    """Formats the rows as a table. If a codec failed, its row shows the reason."""
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
