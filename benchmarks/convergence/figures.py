"""Computes the rows of the table from the losses."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import mean
from typing import Any

from benchmarks.all_reduce.columns import format_rows
from benchmarks.convergence.job import Outcome

TOLERANCE = 0.02
COLUMNS = {
    "task": "task",
    "codec": "codec",
    "settings": "settings",
    "steps": "steps",
    "sent": "sent",
    "on": "loss on",
    "loss": "loss",
    "exact_loss": "exact",
    "relative": "loss/exact - 1",
}


def make_rows(
    outcomes: Sequence[Outcome],
    exact: Sequence[Outcome],
    names: Mapping[str, Any],
) -> list[dict[str, Any]]:
    """Returns the rows of one codec, one row for each loss of the task.

    Args:
        outcomes: for each seed, the outcome of the training run with the codec.
        exact: for each seed, the outcome of the exact training; empty if it failed.
        names: values that identify the training run, by column name. The rows contain them, too.

    Returns:
        The rows. Each contains `names` and:

        - `on`: the data on which the loss is computed.
        - `loss` and `exact_loss`: the means over the seeds; None if a loss is not finite.
        - `relative`: `loss / exact_loss - 1`; None if one of the losses is None.
        - `losses` and `exact_losses`: the loss for each seed.
        - `sent`: the bytes that a worker sends, divided by the bytes that it sends in the exact
          training.
    """
    rows = []
    sent = _ratio(_mean([o.sent_bytes for o in outcomes]), _mean([o.sent_bytes for o in exact]))
    for on in outcomes[0].losses:
        own = [_finite(o.losses[on]) for o in outcomes]
        its = [_finite(o.losses[on]) for o in exact]
        loss, exact_loss = _mean(own), _mean(its)
        ratio = _ratio(loss, exact_loss)
        relative = None if ratio is None else ratio - 1
        figures = {"sent": sent, "loss": loss, "exact_loss": exact_loss, "relative": relative}
        rows.append({**names, "on": on, **figures, "losses": own, "exact_losses": its})
    return rows


def is_beyond(row: Mapping[str, Any]) -> bool:
    """Whether a row's loss is more than two percent above the exact loss, or is unknown."""
    return row.get("relative") is None or row["relative"] > TOLERANCE


def format_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Formats the rows as a table. If a training run failed, its row shows the reason."""
    return format_rows(rows, COLUMNS, _cell)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _mean(values: Sequence[float | None]) -> float | None:
    numbers = [value for value in values if value is not None]
    return mean(numbers) if numbers and len(numbers) == len(values) else None


def _ratio(value: float | None, other: float | None) -> float | None:
    return value / other if value is not None and other else None


def _cell(name: str, value: Any) -> str:
    if value is None:
        return "-"
    if name == "relative":
        return f"{100 * value:+.2f} %"
    if name == "sent":
        return f"{100 * value:.1f} %"
    return f"{value:.4f}" if isinstance(value, float) else str(value)
