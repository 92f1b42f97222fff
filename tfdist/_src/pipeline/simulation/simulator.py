"""Simulates a schedule by the executor's rules and given costs."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from tfdist._src.pipeline.plan.action import Action, Kind, Value
from tfdist._src.pipeline.plan.costs import Costs
from tfdist._src.pipeline.plan.deadlock_check import walk
from tfdist._src.pipeline.plan.edges import Edge
from tfdist._src.pipeline.plan.instructions import Send
from tfdist._src.pipeline.plan.lowering import lower
from tfdist._src.pipeline.plan.schedule import Schedule
from tfdist._src.pipeline.simulation.timeline import Span, Timeline


def simulate(
    schedule: Schedule,
    costs: Costs | None = None,
    edges: Iterable[Edge] | None = None,
    differentiable: Iterable[Edge] | None = None,
) -> Timeline:
    """Computes when each action of a schedule runs.

    Each rank runs its actions one after the other. Sends do not block; in a schedule that splits
    backward passes, a whole one sends its gradient after its first part. A receive is posted when
    the action before it has ended, and the action that consumes its value waits for it. A channel,
    from one rank to another, transfers one message at a time, in order, once it is sent and its
    receive is posted.

    Args:
        schedule: a schedule that passes `plan.validation.check`.
        costs: the seconds of passes and transfers; by default, 1 for F, I and W, 0 for a transfer.
        edges: pairs (source stage, target stage), as for `lower`.
        differentiable: the edges along which gradients flow back, as for `lower`.

    Returns:
        The start and end of each action, which determine the bubble and the activations.

    Raises:
        ScheduleError: the ranks deadlock.
        ValueError: the costs or edges do not fit the schedule.

    Example:
        >>> timeline = simulate(make_schedule("1f1b", ranks=2, microbatches=8))
        >>> timeline.makespan, round(timeline.bubble, 3)
        (27.0, 0.111)
    """
    costs = costs or Costs()
    seconds = costs.seconds(schedule.ranks, schedule.stages)
    spans: list[list[Span]] = [[] for _ in schedule.actions]
    clock = [0.0] * schedule.ranks
    ready = [0.0] * schedule.ranks  # When the output of the last action was ready to send.
    channels: dict[tuple[int, int], _Channel] = defaultdict(_Channel)
    # When all inputs of an action have arrived from other ranks.
    arrival: dict[Value | None, float] = defaultdict(float)
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
    """The messages in flight from one rank to another."""

    sent: deque[float] = field(default_factory=deque)
    received: deque[tuple[float, Value]] = field(default_factory=deque)
    free: float = 0.0

    def move(self, seconds: float) -> Iterator[tuple[Value, float]]:
        """Moves the messages both sent and received; yields the value and arrival of each."""
        while self.sent and self.received:
            ready, value = self.received.popleft()
            self.free = max(self.sent.popleft(), ready, self.free) + seconds
            yield value, self.free
