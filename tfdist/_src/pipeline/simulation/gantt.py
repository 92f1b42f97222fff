"""Gantt charts of a pipeline: ranks from top to bottom, time from left to right."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from tfdist._src.pipeline.plan.action import Action, Kind
from tfdist._src.pipeline.plan.schedule import Schedule
from tfdist._src.pipeline.simulation.simulator import simulate
from tfdist._src.pipeline.simulation.timeline import Span, Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Maximum length of a row of text; a measured timeline may have very short actions.
_MAX_CELLS = 400
# Of a rank's first stage, and of its other stages.
_COLORS = {
    Kind.FORWARD: ("#9fc1e8", "#3f74b5"),
    Kind.BACKWARD: ("#f0b98a", "#bd6b24"),
    Kind.INPUT_GRADIENT: ("#a9d6a5", "#4c914c"),
    Kind.WEIGHT_GRADIENT: ("#d9c0e2", "#8d5aa3"),
}
_NAMES = {
    Kind.FORWARD: "F, forward",
    Kind.BACKWARD: "B, backward",
    Kind.INPUT_GRADIENT: "I, input gradients",
    Kind.WEIGHT_GRADIENT: "W, weight gradients",
}


def text(shown: Schedule | Timeline) -> str:
    """A Gantt chart as text.

    A cell is as long as the shortest action and shows the pass and its microbatch: `F3` on a rank's
    first stage, `f3` on any other. `-` continues an action, `.` is idle.

    Args:
        shown: a timeline; or a schedule, which is simulated with equal costs of F, I and W.

    Example:
        >>> print(text(make_schedule("1f1b", ranks=2, microbatches=2)))
        1f1b: 2 ranks, 2 stages, 2 microbatches; 9 s, bubble 33.3%, peak activations 2 1
        rank 0 F0 F1 .  .  B0 -- .  B1 --
        rank 1 .  F0 B0 -- F1 B1 -- .  .
    """
    timeline = shown if isinstance(shown, Timeline) else simulate(shown)
    lengths = [span.end - span.start for spans in timeline.spans for span in spans]
    shortest = min((length for length in lengths if length > 0), default=1.0)
    unit = max(shortest, timeline.makespan / _MAX_CELLS)
    width = 1 + len(str(timeline.schedule.microbatches - 1))
    lines = [summary(timeline)]
    for rank, spans in enumerate(timeline.spans):
        cells = ["."] * round(timeline.makespan / unit)
        for span in spans:
            first = min(round(span.start / unit), len(cells) - 1)
            last = max(first + 1, min(round(span.end / unit), len(cells)))
            label = span.action.kind.value + str(span.action.microbatch)
            if _is_later(timeline, rank, span.action):
                label = label.lower()
            cells[first:last] = [label] + ["-" * width] * (last - first - 1)
        lines.append(f"rank {rank} " + " ".join(cell.ljust(width) for cell in cells).rstrip())
    return "\n".join(lines)


def draw(timeline: Timeline, path: str | Path) -> None:
    """Draws a Gantt chart: a box for each action, labeled with its microbatch.

    A rank's first stage has light boxes, its other stages dark ones.

    Args:
        timeline: simulated or measured.
        path: the file to write; its extension selects the format, such as .png.

    Raises:
        ImportError: matplotlib is not installed.

    Example:
        >>> draw(simulate(make_schedule("zbv", ranks=4, microbatches=8)), "zbv.png")
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "Drawing a timeline requires matplotlib, which is not installed: pip install matplotlib"
        ) from error
    ranks = len(timeline.spans)
    figure = Figure(figsize=(16, 1.2 + 0.5 * ranks), layout="constrained")
    axis = figure.subplots()
    for rank, spans in enumerate(timeline.spans):
        for span in spans:
            _box(axis, rank, span, later=_is_later(timeline, rank, span.action))
    kinds = [
        kind for kind in Kind if any(s.action.kind is kind for row in timeline.spans for s in row)
    ]
    for kind in kinds:
        axis.bar(0, 0, color=_COLORS[kind][0], label=_NAMES[kind])
    axis.legend(ncols=len(kinds), loc="upper center", bbox_to_anchor=(0.5, -0.15), frameon=False)
    axis.set(
        title=summary(timeline),
        xlabel="seconds",
        xlim=(0, timeline.makespan),
        ylim=(ranks - 0.5, -0.5),
        yticks=range(ranks),
        yticklabels=[f"rank {rank}" for rank in range(ranks)],
    )
    figure.savefig(path, dpi=120)


def summary(timeline: Timeline) -> str:
    """A one-line summary of a timeline.

    Args:
        timeline: simulated or measured.
    """
    schedule = timeline.schedule
    kept = " ".join(f"{peak:g}" for peak in timeline.peak_activations)
    return (
        f"{timeline.name}: {schedule.ranks} ranks, {schedule.stages} stages, "
        f"{schedule.microbatches} microbatches; {timeline.makespan:.4g} s, "
        f"bubble {timeline.bubble:.1%}, peak activations {kept}"
    )


def _box(axis: Axes, rank: int, span: Span, later: bool) -> None:
    length = span.end - span.start
    axis.broken_barh(
        [(span.start, length)],
        (rank - 0.45, 0.9),
        facecolor=_COLORS[span.action.kind][later],
        edgecolor="white",
        linewidth=0.5,
    )
    axis.text(
        span.start + length / 2,
        rank,
        str(span.action.microbatch),
        ha="center",
        va="center",
        fontsize=7,
        color="white" if later else "black",
    )


def _is_later(timeline: Timeline, rank: int, action: Action) -> bool:
    """Whether an action belongs to a stage other than the rank's first."""
    return action.stage != timeline.schedule.stages_of(rank)[0]
