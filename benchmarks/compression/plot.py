"""Plots the loss of each codec against the time of training, for each rate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def plot(rows: Sequence[Mapping[str, Any]], file: str) -> None:
    """Draws a diagram for each rate, with a line for each codec.

    Args:
        rows: the rows that `make_row` returned. Rows with `missing` are not drawn.
        file: the path of the picture. The extension determines the format.
    """
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    measured = [row for row in rows if "missing" not in row]
    rates = list(dict.fromkeys(row["rate"] for row in measured))
    if not rates:
        return
    figure, axes = pyplot.subplots(
        1, len(rates), figsize=(6 * len(rates), 4.5), squeeze=False, layout="constrained"
    )
    for rate, axis in zip(rates, axes[0], strict=True):
        for row in (row for row in measured if row["rate"] == rate):
            losses = [float("nan") if loss is None else loss for loss in row["losses"]]
            axis.plot(row["seconds"], losses, "o-", markersize=3, label=_label(row))
        limit = "no limit" if rate == "none" else rate
        axis.set(title=limit, xlabel="seconds of training", ylabel="loss on rows not trained on")
        axis.grid(alpha=0.3)
        axis.legend()
    figure.savefig(file, dpi=120)
    pyplot.close(figure)


def _label(row: Mapping[str, Any]) -> str:
    codec, chosen = row["codec"], row["chosen"]
    return codec if chosen == codec else f"{codec}: {chosen}"
