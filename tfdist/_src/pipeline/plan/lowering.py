"""Lowering: inserts the transfers between ranks into a schedule."""

import functools
import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from tfdist._src.pipeline.plan.schedule import Action, Edge, Edges, Schedule, StageInput, ValueKind
from tfdist.errors import ScheduleError


@dataclass(frozen=True)
class Transfer:
    """A value passed between stages on different ranks, for one microbatch.

    Attributes:
        value_kind: "activation", to a later stage, or "gradient", to an earlier one.
        source: the stage that produces the value.
        target: the stage that consumes the value.
        microbatch: the microbatch.
        peer: the rank at the other end.
    """

    value_kind: ValueKind
    source: int
    target: int
    microbatch: int
    peer: int

    @functools.cached_property
    def value(self) -> StageInput:
        """The value as identified by the target: the action with an equal `takes` consumes it."""
        return (self.value_kind, self.target, self.microbatch)


@dataclass(frozen=True)
class Send(Transfer):
    """Hands a value to the channel to `peer` without waiting."""

    def __str__(self) -> str:
        return (
            f"send {self.value_kind} {self.source}>{self.target}.{self.microbatch} to {self.peer}"
        )


@dataclass(frozen=True)
class Receive(Transfer):
    """Posts a receive from `peer` without waiting; the action that consumes the value waits."""

    def __str__(self) -> str:
        value = f"{self.value_kind} {self.source}>{self.target}.{self.microbatch}"
        return f"receive {value} from {self.peer}"


Step: TypeAlias = Action | Send | Receive


def walk(
    program: Sequence[Sequence[Step]], capacity: int | None = None
) -> Iterator[tuple[int, Step]]:
    """Walks through the steps of all ranks concurrently.

    Each rank runs its steps in order. A receive does not block; the action that consumes the value
    does. Messages from one rank to another arrive in the order of their sends. Ranks take turns of
    one action, so the order is roughly chronological if all actions take equally long.

    Args:
        program: as returned by `lower`.
        capacity: the maximum number of messages in a channel without a posted receive; a further
            send blocks. By default, no send blocks.

    Yields:
        Pairs of a rank and the step that it runs.

    Raises:
        ScheduleError: the ranks deadlock.
    """
    state = _State(program, capacity)
    moved = True
    while moved:
        moved = False
        for rank in range(len(program)):
            for step in state.advance(rank):
                yield rank, step
                moved = True
    stuck = [rank for rank in range(len(program)) if state.left(rank)]
    if stuck:
        raise ScheduleError(state.describe_cycle(stuck[0]))


class _State:
    """The progress of the ranks and their channels."""

    def __init__(self, program: Sequence[Sequence[Step]], capacity: int | None) -> None:
        self._program = program
        self._capacity = capacity
        self._position = [0] * len(program)
        # Number of messages so far, by (sending rank, receiving rank).
        self._sent: dict[tuple[int, int], int] = defaultdict(int)
        self._received: dict[tuple[int, int], int] = defaultdict(int)
        # By rank and consumed value: the receives of the value, and their indices on the channel.
        self._incoming: list[dict[StageInput | None, list[tuple[Receive, int]]]] = [
            defaultdict(list) for _ in program
        ]

    def left(self, rank: int) -> bool:
        """Whether a rank has steps left."""
        return self._position[rank] < len(self._program[rank])

    def blocker(self, rank: int) -> Send | Receive | None:
        """Returns the transfer that a rank's next step must wait for; None if it can run."""
        step = self._program[rank][self._position[rank]]
        if isinstance(step, Send) and self._capacity is not None:
            channel = (rank, step.peer)
            full = self._sent[channel] - self._received[channel] >= self._capacity
            return step if full else None
        if isinstance(step, Action):
            for receive, number in self._incoming[rank].get(step.takes, ()):
                if self._sent[receive.peer, rank] <= number:
                    return receive
        return None

    def advance(self, rank: int) -> Iterator[Step]:
        """Runs a rank's next steps: at most one action, and the transfers around it."""
        acted = False
        while self.left(rank) and self.blocker(rank) is None:
            step = self._program[rank][self._position[rank]]
            if acted and isinstance(step, Action):
                return
            acted = acted or isinstance(step, Action)
            self._run(rank, step)
            yield step

    def _run(self, rank: int, step: Step) -> None:
        self._position[rank] += 1
        if isinstance(step, Send):
            self._sent[rank, step.peer] += 1
        elif isinstance(step, Receive):
            channel = (step.peer, rank)
            self._incoming[rank][step.value].append((step, self._received[channel]))
            self._received[channel] += 1

    def describe_cycle(self, rank: int) -> str:
        """Describes the cycle of waiting ranks, starting from one of them."""
        waits: dict[int, str] = {}
        while rank not in waits and self.left(rank):
            blocker = self.blocker(rank)
            if blocker is None:
                break
            step = self._program[rank][self._position[rank]]
            at = "" if step is blocker else f" at {step}"
            waits[rank] = f"rank {rank} waits{at} to {blocker}"
            rank = blocker.peer
        return "The ranks wait for one another: " + ", ".join(waits.values()) + "."


__all__ = ["Receive", "Send", "Step", "lower"]

# For each rank and each of its actions, the sends that follow it.
_Sends: TypeAlias = list[list[list[Send]]]
# For each channel and each of its messages in order: the position of the receive, as the index of
# the action that follows it.
_ReceivePositions: TypeAlias = dict[tuple[int, int], list[int]]


def lower(
    schedule: Schedule,
    edges: Iterable[Edge] | None = None,
    differentiable: Iterable[Edge] | None = None,
) -> list[list[Step]]:
    """Inserts the transfers between ranks into a schedule.

    A value is sent right after the action that produces it. Its receive is posted one action before
    the action that consumes it, so that the transfer overlaps with the action between. The receive
    may be posted earlier, for two reasons: messages from one rank to another arrive in the order of
    their sends; and at most one message of a channel waits for its receive, so that blocking sends
    on a full channel cannot deadlock. Nothing is sent between stages of the same rank.

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
    positions = _in_order(_before_use(schedule, sends))
    positions = _in_order(_with_room(_program(schedule, sends, positions), positions))
    return _program(schedule, sends, positions)


def _sends(schedule: Schedule, edges: Edges, rank: int, action: Action) -> list[Send]:
    value_kind = action.kind.carries
    if value_kind is None:
        return []
    peers = [(stage, schedule.rank_of(stage)) for stage in edges.targets(action)]
    return [
        Send(value_kind, action.stage, stage, action.microbatch, peer)
        for stage, peer in peers
        if peer != rank
    ]


def _before_use(schedule: Schedule, sends: _Sends) -> _ReceivePositions:
    """Places each receive one action before the action that consumes the value."""
    consumed_at = [
        {action.takes: index for index, action in enumerate(actions)}
        for actions in schedule.actions
    ]
    positions: _ReceivePositions = defaultdict(list)
    for rank, by_action in enumerate(sends):
        for send in itertools.chain.from_iterable(by_action):
            index = consumed_at[send.peer][send.value]
            positions[rank, send.peer].append(max(0, index - 1))
    return positions


def _in_order(positions: _ReceivePositions) -> _ReceivePositions:
    """Moves receives earlier to keep the receives of a channel in order."""
    return {
        channel: list(itertools.accumulate(reversed(indices), min))[::-1]
        for channel, indices in positions.items()
    }


def _with_room(program: list[list[Step]], positions: _ReceivePositions) -> _ReceivePositions:
    """Moves receives earlier, so that each message is received before its channel sends the next.

    "Before" refers to one possible execution order of all ranks. That order remains possible
    regardless of how long sends block on a full channel.
    """
    actions = [0] * len(program)
    sent: Counter[tuple[int, int]] = Counter()
    for rank, step in walk(program):
        if isinstance(step, Action):
            actions[rank] += 1
        elif isinstance(step, Send):
            channel, number = (rank, step.peer), sent[rank, step.peer]
            if number > 0:
                last = positions[channel][number - 1]
                positions[channel][number - 1] = min(last, actions[step.peer])
            sent[channel] += 1
    return positions


def _program(schedule: Schedule, sends: _Sends, positions: _ReceivePositions) -> list[list[Step]]:
    receives: list[list[list[Receive]]] = [[[] for _ in actions] for actions in schedule.actions]
    for rank, by_action in enumerate(sends):
        numbers: Counter[int] = Counter()
        for send in itertools.chain.from_iterable(by_action):
            position = positions[rank, send.peer][numbers[send.peer]]
            numbers[send.peer] += 1
            receive = Receive(send.value_kind, send.source, send.target, send.microbatch, rank)
            receives[send.peer][position].append(receive)
    program: list[list[Step]] = [[] for _ in schedule.actions]
    for rank, actions in enumerate(schedule.actions):
        for before, action, after in zip(receives[rank], actions, sends[rank], strict=True):
            program[rank] += [*before, action, *after]
    return program
