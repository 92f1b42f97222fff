"""Pictures of a pipeline's time: ranks from top to bottom, time from left to right."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from tfdist.pipeline.plan.action import Action, Kind
from tfdist.pipeline.plan.schedule import Schedule
from tfdist.pipeline.simulation.simulator import simulate
from tfdist.pipeline.simulation.timeline import Span, Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Cells in a row of text at most; a measured timeline may have very short actions.
_CELLS = 400
# Of a rank's first stage, and of its other ones.
_COLOURS = {
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
    """A picture in characters.

    A cell is as long as the shortest action and says which pass runs, of which microbatch: `F3` on
    a rank's first stage, `f3` on another one of it. `-` goes on with an action, `.` is idle.

    Args:
        shown: a timeline; or a schedule, which is simulated with the same time for F, I and W.

    Example:
        >>> print(text(make_schedule("1f1b", ranks=2, microbatches=2)))
        1f1b: 2 ranks, 2 stages, 2 microbatches; 9 s, bubble 33.3%, peak activations 2 1
        rank 0 F0 F1 .  .  B0 -- .  B1 --
        rank 1 .  F0 B0 -- F1 B1 -- .  .
    """
    timeline = shown if isinstance(shown, Timeline) else simulate(shown)
    lengths = [span.end - span.start for own in timeline.spans for span in own]
    shortest = min((length for length in lengths if length > 0), default=1.0)
    unit = max(shortest, timeline.makespan / _CELLS)
    width = 1 + len(str(timeline.schedule.microbatches - 1))
    lines = [summary(timeline)]
    for rank, own in enumerate(timeline.spans):
        cells = ["."] * round(timeline.makespan / unit)
        for span in own:
            first = min(round(span.start / unit), len(cells) - 1)
            last = max(first + 1, min(round(span.end / unit), len(cells)))
            label = span.action.kind.value + str(span.action.microbatch)
            if _is_later(timeline, rank, span.action):
                label = label.lower()
            cells[first:last] = [label] + ["-" * width] * (last - first - 1)
        lines.append(f"rank {rank} " + " ".join(cell.ljust(width) for cell in cells).rstrip())
    return "\n".join(lines)


def draw(timeline: Timeline, path: str | Path) -> None:
    """Draws a picture: a box for each action, with its microbatch's number.

    A rank's first stage has light boxes, its other ones dark boxes.

    Args:
        timeline: simulated or measured.
        path: where the picture goes; its ending names the format, such as .png.

    Raises:
        ImportError: matplotlib is not installed.

    Example:
        >>> draw(simulate(make_schedule("zbv", ranks=4, microbatches=8)), "zbv.png")
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "Drawing a timeline takes matplotlib, which is not installed: pip install matplotlib"
        ) from error
    ranks = len(timeline.spans)
    figure = Figure(figsize=(16, 1.2 + 0.5 * ranks), layout="constrained")
    axis = figure.subplots()
    for rank, own in enumerate(timeline.spans):
        for span in own:
            _box(axis, rank, span, later=_is_later(timeline, rank, span.action))
    kinds = [
        kind for kind in Kind if any(s.action.kind is kind for own in timeline.spans for s in own)
    ]
    for kind in kinds:
        axis.bar(0, 0, color=_COLOURS[kind][0], label=_NAMES[kind])
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
    """A timeline in one line.

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
        facecolor=_COLOURS[span.action.kind][later],
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
    """Whether an action is of another stage than the rank's first."""
    return action.stage != timeline.schedule.stages_of(rank)[0]
