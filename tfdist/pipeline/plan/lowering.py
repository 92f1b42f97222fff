"""Lowering: puts the transfers between ranks into a schedule."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import TypeAlias

from tfdist.pipeline.plan.action import Action
from tfdist.pipeline.plan.deadlock_check import walk
from tfdist.pipeline.plan.edges import Edge, Edges
from tfdist.pipeline.plan.schedule import Schedule
from tfdist.pipeline.plan.transfer import Receive, Send, Step

__all__ = ["Receive", "Send", "Step", "lower"]

# For each rank and each of its actions, what is sent after it.
_Sends: TypeAlias = list[list[list[Send]]]
# For each message from one rank to another, in order: before which action it is received.
_Places: TypeAlias = dict[tuple[int, int], list[int]]


def lower(
    schedule: Schedule,
    edges: Iterable[Edge] | None = None,
    differentiable: Iterable[Edge] | None = None,
) -> list[list[Step]]:
    """Puts the transfers between ranks into a schedule.

    A value is sent directly after the action that makes it. A receive comes one action before the
    one that takes the value, so that the transfer runs beside that action; or earlier, for two
    reasons. What a rank has for another arrives in the order in which it is sent. And at most one
    message of a channel waits for its receive, so that sends that wait for room do not stop a
    schedule. Nothing is sent between stages of one rank.

    Args:
        schedule: what the ranks compute, all that belongs to its microbatches.
        edges: pairs (source stage, target stage), the source below the target, at any distance;
            by default each stage's output goes to the next one.
        differentiable: those of the edges over which a gradient goes back; by default all.

    Returns:
        For each rank, its actions with sends and receives between them.

    Raises:
        ValueError: an edge is none between two stages of the schedule.
        ScheduleError: the ranks would wait for one another.

    Example:
        >>> for steps in lower(make_schedule("gpipe", ranks=2, microbatches=1)):
        ...     print(", ".join(map(str, steps)))
        receive gradient 1>0.0 from 1, F0.0, send activation 0>1.0 to 1, B0.0
        receive activation 0>1.0 from 0, F1.0, B1.0, send gradient 1>0.0 to 0
    """
    links = Edges(schedule.stages, edges, differentiable)
    sends = [
        [_sends(schedule, links, rank, action) for action in own]
        for rank, own in enumerate(schedule.actions)
    ]
    places = _in_order(_before_use(schedule, sends))
    places = _in_order(_with_room(_program(schedule, sends, places), places))
    return _program(schedule, sends, places)


def _sends(schedule: Schedule, links: Edges, rank: int, action: Action) -> list[Send]:
    what = action.kind.carries
    if what is None:
        return []
    peers = [(stage, schedule.rank_of(stage)) for stage in links.targets(action)]
    return [
        Send(what, action.stage, stage, action.microbatch, peer)
        for stage, peer in peers
        if peer != rank
    ]


def _before_use(schedule: Schedule, sends: _Sends) -> _Places:
    """Receives one action before the one that takes the value."""
    taken_at = [
        {action.takes: index for index, action in enumerate(own)} for own in schedule.actions
    ]
    places: _Places = defaultdict(list)
    for rank, by_action in enumerate(sends):
        for send in itertools.chain.from_iterable(by_action):
            index = taken_at[send.peer][send.value]
            places[rank, send.peer].append(max(0, index - 1))
    return places


def _in_order(places: _Places) -> _Places:
    """No receive comes after a later one of its channel."""
    return {
        channel: list(itertools.accumulate(reversed(own), min))[::-1]
        for channel, own in places.items()
    }


def _with_room(program: list[list[Step]], places: _Places) -> _Places:
    """A message is received before the next one of its channel is sent.

    Before in one order in which all ranks can run: this order remains possible, however long sends
    wait for room.
    """
    actions = [0] * len(program)
    sent: Counter[tuple[int, int]] = Counter()
    for rank, step in walk(program):
        if isinstance(step, Action):
            actions[rank] += 1
        elif isinstance(step, Send):
            channel, number = (rank, step.peer), sent[rank, step.peer]
            if number > 0:
                last = places[channel][number - 1]
                places[channel][number - 1] = min(last, actions[step.peer])
            sent[channel] += 1
    return places


def _program(schedule: Schedule, sends: _Sends, places: _Places) -> list[list[Step]]:
    receives: list[list[list[Receive]]] = [[[] for _ in own] for own in schedule.actions]
    for rank, by_action in enumerate(sends):
        numbers: Counter[int] = Counter()
        for send in itertools.chain.from_iterable(by_action):
            place = places[rank, send.peer][numbers[send.peer]]
            numbers[send.peer] += 1
            receive = Receive(send.what, send.source, send.target, send.microbatch, rank)
            receives[send.peer][place].append(receive)
    program: list[list[Step]] = [[] for _ in schedule.actions]
    for rank, own in enumerate(schedule.actions):
        for before, action, after in zip(receives[rank], own, sends[rank], strict=True):
            program[rank] += [*before, action, *after]
    return program
