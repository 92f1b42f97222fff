"""Lowering: inserts the transfers between ranks into a schedule."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import TypeAlias

from tfdist._src.pipeline.plan.action import Action
from tfdist._src.pipeline.plan.deadlock_check import walk
from tfdist._src.pipeline.plan.edges import Edge, Edges
from tfdist._src.pipeline.plan.instructions import Receive, Send, Step
from tfdist._src.pipeline.plan.schedule import Schedule

__all__ = ["Receive", "Send", "Step", "lower"]

# For each rank and each of its actions, the sends that follow it.
_Sends: TypeAlias = list[list[list[Send]]]
# For each channel and each of its messages, in order: before which action it is received.
_Places: TypeAlias = dict[tuple[int, int], list[int]]


def lower(
    schedule: Schedule,
    edges: Iterable[Edge] | None = None,
    differentiable: Iterable[Edge] | None = None,
) -> list[list[Step]]:
    """Inserts the transfers between ranks into a schedule.

    A value is sent right after the action that produces it. Its receive is posted one action before
    the one that consumes it, so that the transfer overlaps with that action; or earlier, for two
    reasons: messages from one rank to another arrive in the order in which they are sent, and at
    most one message of a channel waits for its receive, so that sends that block on a full channel
    cannot deadlock. Nothing is sent between stages of the same rank.

    Args:
        schedule: the ranks' actions, complete for every microbatch.
        edges: pairs (source stage, target stage), the source before the target but not
            necessarily adjacent; by default, each stage feeds the next.
        differentiable: the edges along which gradients flow back; by default, all.

    Returns:
        For each rank, its actions with the sends and receives between them.

    Raises:
        ValueError: an edge does not connect two stages of the schedule.
        ScheduleError: the ranks would deadlock.

    Example:
        >>> for steps in lower(make_schedule("gpipe", ranks=2, microbatches=1)):
        ...     print(", ".join(map(str, steps)))
        receive gradient 1>0.0 from 1, F0.0, send activation 0>1.0 to 1, B0.0
        receive activation 0>1.0 from 0, F1.0, B1.0, send gradient 1>0.0 to 0
    """
    stage_edges = Edges(schedule.stages, edges, differentiable)
    sends = [
        [_sends(schedule, stage_edges, rank, action) for action in actions]
        for rank, actions in enumerate(schedule.actions)
    ]
    places = _in_order(_before_use(schedule, sends))
    places = _in_order(_with_room(_program(schedule, sends, places), places))
    return _program(schedule, sends, places)


def _sends(schedule: Schedule, edges: Edges, rank: int, action: Action) -> list[Send]:
    what = action.kind.carries
    if what is None:
        return []
    peers = [(stage, schedule.rank_of(stage)) for stage in edges.targets(action)]
    return [
        Send(what, action.stage, stage, action.microbatch, peer)
        for stage, peer in peers
        if peer != rank
    ]


def _before_use(schedule: Schedule, sends: _Sends) -> _Places:
    """Places each receive one action before the one that consumes the value."""
    consumed_at = [
        {action.takes: index for index, action in enumerate(actions)}
        for actions in schedule.actions
    ]
    places: _Places = defaultdict(list)
    for rank, by_action in enumerate(sends):
        for send in itertools.chain.from_iterable(by_action):
            index = consumed_at[send.peer][send.value]
            places[rank, send.peer].append(max(0, index - 1))
    return places


def _in_order(places: _Places) -> _Places:
    """Moves receives earlier to keep those of a channel in order."""
    return {
        channel: list(itertools.accumulate(reversed(indices), min))[::-1]
        for channel, indices in places.items()
    }


def _with_room(program: list[list[Step]], places: _Places) -> _Places:
    """Moves receives earlier, so that each message is received before its channel's next is sent.

    "Before" refers to one order in which all ranks can run: that order remains possible, however
    long sends block on a full channel.
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
    receives: list[list[list[Receive]]] = [[[] for _ in actions] for actions in schedule.actions]
    for rank, by_action in enumerate(sends):
        numbers: Counter[int] = Counter()
        for send in itertools.chain.from_iterable(by_action):
            place = places[rank, send.peer][numbers[send.peer]]
            numbers[send.peer] += 1
            receive = Receive(send.what, send.source, send.target, send.microbatch, rank)
            receives[send.peer][place].append(receive)
    program: list[list[Step]] = [[] for _ in schedule.actions]
    for rank, actions in enumerate(schedule.actions):
        for before, action, after in zip(receives[rank], actions, sends[rank], strict=True):
            program[rank] += [*before, action, *after]
    return program
