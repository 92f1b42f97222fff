"""Lowers a schedule: inserts the sends and receives between ranks."""

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
    """The transfer of a value of one microbatch between two stages on different ranks.

    Attributes:
        value_kind: "activation" for a value that passes to a later stage, or "gradient" for a
            gradient that passes back to an earlier stage.
        source: the index of the stage that produces the value.
        target: the index of the stage that consumes the value.
        microbatch: the index of the microbatch.
        peer: the pipeline rank with which this rank exchanges the value.
    """

    value_kind: ValueKind
    source: int
    target: int
    microbatch: int
    peer: int

    @functools.cached_property
    def value(self) -> StageInput:
        """Identifies the value on the target's rank.

        The action that consumes the value has an equal `Action.takes`.
        """
        return (self.value_kind, self.target, self.microbatch)


@dataclass(frozen=True)
class Send(Transfer):
    """The step in which a rank sends a value to `peer`. The rank does not wait for the transfer."""

    def __str__(self) -> str:
        return (
            f"send {self.value_kind} {self.source}>{self.target}.{self.microbatch} to {self.peer}"
        )


@dataclass(frozen=True)
class Receive(Transfer):
    """The step in which a rank posts a receive for a value from `peer`.

    The rank does not wait for the value until it runs the action that consumes the value.
    """

    def __str__(self) -> str:
        value = f"{self.value_kind} {self.source}>{self.target}.{self.microbatch}"
        return f"receive {value} from {self.peer}"


Step: TypeAlias = Action | Send | Receive


def walk(
    program: Sequence[Sequence[Step]], capacity: int | None = None
) -> Iterator[tuple[int, Step]]:
    """Yields the steps of all ranks in an order in which they can run.

    Each rank runs its own steps in order. A receive does not block. Instead, the action that
    consumes the value blocks until the value has been sent. Messages from one rank to another
    arrive in the order in which they were sent. The ranks take turns, and each rank runs one action
    per turn. So the order of the steps is roughly chronological if all actions take the same time.

    Args:
        program: the steps of each rank, as returned by `lower`.
        capacity: the maximum number of messages that one rank can have sent to another before the
            other rank posts receives for them. When this number is reached, the next send blocks.
            By default, sends never block.

    Yields:
        Pairs of a rank and the step that the rank runs next.

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
    """The steps that the ranks have run so far, and the messages in the channels between them."""

    def __init__(self, program: Sequence[Sequence[Step]], capacity: int | None) -> None:
        self._program = program
        self._capacity = capacity
        self._position = [0] * len(program)
        # The number of messages sent, and of receives posted, by (sending rank, receiving rank).
        self._sent: dict[tuple[int, int], int] = defaultdict(int)
        self._received: dict[tuple[int, int], int] = defaultdict(int)
        # For each rank, and for each value that an action consumes: the receives that make up the
        # value, each with its index among all receives of the same channel.
        self._incoming: list[dict[StageInput | None, list[tuple[Receive, int]]]] = [
            defaultdict(list) for _ in program
        ]

    def left(self, rank: int) -> bool:
        """Whether a rank has steps left."""
        return self._position[rank] < len(self._program[rank])

    def blocker(self, rank: int) -> Send | Receive | None:
        """Returns the transfer for which a rank's next step must wait, or None if it can run."""
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
        """Runs and yields a rank's next steps: at most one action, and the transfers around it."""
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
        """Describes in words which ranks wait for one another, starting with a given rank."""
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

# For each rank, and for each of its actions, the sends that follow the action.
_Sends: TypeAlias = list[list[list[Send]]]
# For each channel, and for each of its messages in order, the index of the action of the receiving
# rank before which the receive is posted.
_ReceivePositions: TypeAlias = dict[tuple[int, int], list[int]]


def lower(
    schedule: Schedule,
    edges: Iterable[Edge] | None = None,
    differentiable: Iterable[Edge] | None = None,
) -> list[list[Step]]:
    """Inserts sends and receives into a schedule, for the values that pass between ranks.

    A value is sent directly after the action that produces the value. On the receiving rank, the
    receive is posted one action before the action that consumes the value. So the transfer can
    overlap with the action between them. Some receives are posted even earlier, for two reasons.
    First, the receives of a channel must be posted in the order of the sends. Second, the receive
    of a message is posted before the next message is sent over the same channel. So the ranks do
    not deadlock even if sends block because the channel is full. Values that pass between two
    stages on the same rank are not sent.

    Args:
        schedule: the actions of each rank, which must include all passes of every microbatch.
        edges: pairs `(source, target)` of stages, such that `target` consumes outputs of `source`.
            The target must come after the source, but not necessarily directly. By default, each
            stage feeds the next stage.
        differentiable: the edges over which the target sends gradients back to the source. By
            default, these are all edges.

    Returns:
        For each rank, its actions, sends and receives in order.

    Raises:
        ValueError: `edges` or `differentiable` is invalid; see `Edges`.
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
    """Moves receives earlier, so that each channel's receives are in the order of the sends."""
    return {
        channel: list(itertools.accumulate(reversed(indices), min))[::-1]
        for channel, indices in positions.items()
    }


def _with_room(program: list[list[Step]], positions: _ReceivePositions) -> _ReceivePositions:
    """Moves receives earlier, so that the receive of a message precedes the channel's next send.

    The function considers one order in which the steps of all ranks can run, as yielded by `walk`.
    This order remains possible if the sends block because a channel is full.
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
