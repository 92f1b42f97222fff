"""Plots the bandwidth and the time of each backend against the size.

For small sizes, the time is almost entirely latency.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.all_reduce.sizes import format_size

INSTALL = "A plot takes matplotlib: pip install 'tfdist[plot]', or pip install matplotlib"


def can_plot() -> bool:
    """Whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def plot(rows: Sequence[Mapping[str, Any]], file: str) -> None:
    """Draws a picture of the rows.

    Args:
        rows: the rows that `make_rows` returned. Rows with `missing` are not drawn.
        file: the path of the picture. The extension determines the format.
    """
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    measured = [row for row in rows if "missing" not in row]
    counts = sorted({row["ranks"] for row in measured})
    if not counts:
        return
    figure, axes = pyplot.subplots(
        len(counts), 2, figsize=(12, 4.5 * len(counts)), squeeze=False, layout="constrained"
    )
    for ranks, (left, right) in zip(counts, axes, strict=True):
        own = [row for row in measured if row["ranks"] == ranks]
        for backend in dict.fromkeys(row["backend"] for row in own):
            line = sorted((r for r in own if r["backend"] == backend), key=lambda r: r["bytes"])
            sizes = [r["bytes"] for r in line]
            style = "--" if backend == "memcpy" else "o-"
            left.plot(sizes, [r["busbw_gbps"] for r in line], style, label=backend)
            right.plot(sizes, [r["seconds"] * 1e6 for r in line], style, label=backend)
        ticks = sorted({row["bytes"] for row in own})
        for axis, name in ((left, "bus bandwidth, GB/s"), (right, "time, µs")):
            axis.set(xscale="log", yscale="log", ylabel=name, title=f"{ranks} ranks")
            axis.set_xticks(ticks, [format_size(t) for t in ticks], rotation=45)
            axis.minorticks_off()
            axis.grid(alpha=0.3)
        left.legend()
    figure.savefig(file, dpi=120)
    pyplot.close(figure)
