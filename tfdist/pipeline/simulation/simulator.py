"""What a schedule takes, by the executor's rules and given costs."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from tfdist.pipeline.plan.action import Action, Kind, Value
from tfdist.pipeline.plan.costs import Costs
from tfdist.pipeline.plan.deadlock_check import walk
from tfdist.pipeline.plan.edges import Edge
from tfdist.pipeline.plan.lowering import lower
from tfdist.pipeline.plan.schedule import Schedule
from tfdist.pipeline.plan.transfer import Send
from tfdist.pipeline.simulation.timeline import Span, Timeline


def simulate(
    schedule: Schedule,
    costs: Costs | None = None,
    edges: Iterable[Edge] | None = None,
    differentiable: Iterable[Edge] | None = None,
) -> Timeline:
    """Computes when each action of a schedule runs.

    Each rank runs its actions one after the other. Sends do not wait; where a schedule splits
    backward passes, the gradient of a whole one leaves after its first part. A receive is ready
    when the action before it has ended, and the action that takes its value waits for it. A
    channel, from one rank to another, moves one message at a time, in order, from the moment when
    it is sent and its receive is ready.

    Args:
        schedule: a schedule that passes `tfdist.pipeline.plan.validation.check`.
        costs: the seconds of passes and transfers; by default 1 for F, I and W, 0 for a transfer.
        edges: pairs (source stage, target stage), as of `lower`.
        differentiable: those of the edges over which a gradient goes back, as of `lower`.

    Returns:
        Start and end of each action, of which bubble and activations follow.

    Raises:
        ScheduleError: the ranks wait for one another.
        ValueError: costs or edges do not suit the schedule.

    Example:
        >>> timeline = simulate(make_schedule("1f1b", ranks=2, microbatches=8))
        >>> timeline.makespan, round(timeline.bubble, 3)
        (27.0, 0.111)
    """
    costs = costs or Costs()
    seconds = costs.seconds(schedule.ranks, schedule.stages)
    spans: list[list[Span]] = [[] for _ in schedule.actions]
    clock = [0.0] * schedule.ranks
    made = [0.0] * schedule.ranks  # When what the last action sends was there.
    channels: dict[tuple[int, int], _Channel] = defaultdict(_Channel)
    # When all that an action takes has come from other ranks.
    arrival: dict[Value | None, float] = defaultdict(float)
    for rank, step in walk(lower(schedule, edges, differentiable)):
        if isinstance(step, Action):
            start = max(clock[rank], arrival[step.takes])
            clock[rank] = made[rank] = start + seconds[step.kind][step.stage]
            if step.kind is Kind.BACKWARD and schedule.splits_backward:
                first = start + seconds[Kind.INPUT_GRADIENT][step.stage]
                made[rank] = min(first, clock[rank])
            spans[rank].append(Span(step, start, clock[rank]))
            continue
        if isinstance(step, Send):
            channel = channels[rank, step.peer]
            channel.sent.append(made[rank])
        else:
            channel = channels[step.peer, rank]
            channel.received.append((clock[rank], step.value))
        for value, time in channel.move(costs.transfer):
            arrival[value] = max(arrival[value], time)
    return Timeline(schedule.name, tuple(map(tuple, spans)))


@dataclass
class _Channel:
    """The messages from one rank to another that are on their way."""

    sent: deque[float] = field(default_factory=deque)
    received: deque[tuple[float, Value]] = field(default_factory=deque)
    free: float = 0.0

    def move(self, seconds: float) -> Iterator[tuple[Value, float]]:
        """Moves each message that is both sent and received; yields what it is and its arrival."""
        while self.sent and self.received:
            ready, value = self.received.popleft()
            self.free = max(self.sent.popleft(), ready, self.free) + seconds
            yield value, self.free
