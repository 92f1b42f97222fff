"""Simulates schedules by the rules of `MicrobatchExecutor`, and draws timelines."""

from __future__ import annotations

import functools
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from tfdist._src.pipeline.plan.lowering import Send, lower, walk
from tfdist._src.pipeline.plan.schedule import Action, Costs, Edge, Kind, Schedule, StageInput
from tfdist._src.pipeline.plan.validation import peak_activations

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclass(frozen=True)
class Span:
    """An action with its start and end time.

    Attributes:
        action: the action.
        start: the time at which the action starts, in seconds since the start of the step.
        end: the time at which the action ends, in seconds since the start of the step.
    """

    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """The simulated or measured times of every rank's actions.

    Attributes:
        name: the name of the schedule.
        spans: for each rank, the rank's actions in order, with their times. Time 0 is the start of
            the step on all ranks.

    Example:
        >>> timeline = simulate(make_schedule("gpipe", ranks=2, microbatches=6))
        >>> timeline.makespan, round(timeline.bubble, 3)
        (21.0, 0.143)
    """

    name: str
    spans: tuple[tuple[Span, ...], ...]

    @functools.cached_property
    def makespan(self) -> float:
        """The time in seconds at which the last action of all ranks ends."""
        return max((span.end for spans in self.spans for span in spans), default=0.0)

    @property
    def bubbles(self) -> tuple[float, ...]:
        """For each rank, the fraction of the makespan during which the rank is idle."""
        whole = self.makespan
        busy = (sum(span.end - span.start for span in spans) for spans in self.spans)
        return tuple(1 - seconds / whole if whole else 0.0 for seconds in busy)

    @property
    def bubble(self) -> float:
        """The average of `bubbles` over all ranks."""
        return sum(self.bubbles) / len(self.spans)

    @functools.cached_property
    def schedule(self) -> Schedule:
        """The actions without their times."""
        return Schedule(self.name, tuple(tuple(s.action for s in spans) for spans in self.spans))

    def costs(self) -> Costs:
        """Returns the median duration of each stage's passes over the microbatches.

        Example:
            >>> simulate(make_schedule("1f1b", ranks=2, microbatches=6)).costs().backward
            (2.0, 2.0)
        """
        seconds: dict[tuple[Kind, int], list[float]] = defaultdict(list)
        for span in (span for spans in self.spans for span in spans):
            seconds[span.action.kind, span.action.stage].append(span.end - span.start)
        stages = range(self.schedule.stages)

        def each(kind: Kind) -> tuple[float, ...]:
            return tuple(median(seconds.get((kind, stage), [0.0])) for stage in stages)

        inputs, weights = each(Kind.INPUT_GRADIENT), each(Kind.WEIGHT_GRADIENT)
        whole = each(Kind.BACKWARD) if any(each(Kind.BACKWARD)) else None
        return Costs(each(Kind.FORWARD), inputs, weights, whole)

    @property
    def peak_activations(self) -> tuple[float, ...]:
        """For each rank, the largest number of activations that it keeps at the same time."""
        return peak_activations(self.schedule)


def simulate(
    schedule: Schedule,
    costs: Costs | None = None,
    edges: Iterable[Edge] | None = None,
    differentiable: Iterable[Edge] | None = None,
) -> Timeline:
    """Computes when each action of a schedule runs.

    The simulation follows these rules:

    - Each rank runs its actions one after another.
    - Sends do not block. An action's output is sent when the action ends. There is one exception:
      if the schedule splits some backward passes, a whole backward pass sends its gradients when
      its first part ends.
    - A receive is posted when the previous action of the rank has ended. The action that consumes
      the received value waits until the value arrives.
    - Each pair of a sending and a receiving rank has a channel. A channel transfers one message at
      a time, in the order of the sends. A transfer starts when the message has been sent and its
      receive has been posted.

    Args:
        schedule: a schedule that passes `plan.validation.check`.
        costs: the durations of passes and transfers in seconds. By default, F, I and W take 1 each
            and a transfer takes 0.
        edges: pairs `(source, target)` of stages, as for `lower`.
        differentiable: the edges over which gradients are sent back, as for `lower`.

    Returns:
        The timeline with the start and end of each action.

    Raises:
        ScheduleError: the ranks deadlock.
        ValueError: `costs`, `edges` or `differentiable` is invalid for this schedule.

    Example:
        >>> timeline = simulate(make_schedule("1f1b", ranks=2, microbatches=8))
        >>> timeline.makespan, round(timeline.bubble, 3)
        (27.0, 0.111)
    """
    costs = costs or Costs()
    seconds = costs.seconds(schedule.ranks, schedule.stages)
    spans: list[list[Span]] = [[] for _ in schedule.actions]
    clock = [0.0] * schedule.ranks
    # For each rank, the time at which the output of its latest action was ready to be sent.
    ready = [0.0] * schedule.ranks
    channels: dict[tuple[int, int], _Channel] = defaultdict(_Channel)
    # For each action, by its `takes`: the time at which its last input arrived from another rank.
    arrival: dict[StageInput | None, float] = defaultdict(float)
    for rank, step in walk(lower(schedule, edges, differentiable)):
        if isinstance(step, Action):
            start = max(clock[rank], arrival[step.takes])
            clock[rank] = ready[rank] = start + seconds[step.kind][step.stage]
            if step.kind is Kind.BACKWARD and schedule.splits_backward:
                first = start + seconds[Kind.INPUT_GRADIENT][step.stage]
                ready[rank] = min(first, clock[rank])
            spans[rank].append(Span(step, start, clock[rank]))
            continue
        if isinstance(step, Send):
            channel = channels[rank, step.peer]
            channel.sent.append(ready[rank])
        else:
            channel = channels[step.peer, rank]
            channel.received.append((clock[rank], step.value))
        for value, time in channel.move(costs.transfer):
            arrival[value] = max(arrival[value], time)
    return Timeline(schedule.name, tuple(map(tuple, spans)))


@dataclass
class _Channel:
    """A channel from one rank to another, with the messages that have not been transferred yet."""

    sent: deque[float] = field(default_factory=deque)
    received: deque[tuple[float, StageInput]] = field(default_factory=deque)
    free: float = 0.0

    def move(self, seconds: float) -> Iterator[tuple[StageInput, float]]:
        """Transfers all messages for which a receive has been posted.

        Args:
            seconds: the duration of a transfer.

        Yields:
            Each transferred value with its arrival time.
        """
        while self.sent and self.received:
            ready, value = self.received.popleft()
            self.free = max(self.sent.popleft(), ready, self.free) + seconds
            yield value, self.free


# The maximum number of cells in a row of `text`. The limit is needed for measured timelines, which
# may contain very short actions.
_MAX_CELLS = 400
# For each kind of pass, the color for a rank's first stage and the color for its other stages.
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
    """Draws a Gantt chart as text.

    Each row shows the actions of a rank, and each cell of a row stands for the duration of the
    shortest action. The first cell of an action contains the kind of the pass and the microbatch:
    `F3` on the rank's first stage, or `f3` on any other stage of the rank. The other cells of the
    action contain `-`. A cell with `.` means that the rank is idle.

    Args:
        shown: a timeline, or a schedule. A schedule is first simulated with equal costs of F, I
            and W.

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

    The actions of a rank's first stage are drawn in light colors, and the actions of its other
    stages in dark colors.

    Args:
        timeline: a simulated or measured timeline.
        path: the file to write. Its extension, such as `.png`, determines the format.

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
    """Returns a one-line summary of a timeline.

    Args:
        timeline: a simulated or measured timeline.
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
    """Whether an action belongs to a stage other than the rank's first stage."""
    return action.stage != timeline.schedule.stages_of(rank)[0]
