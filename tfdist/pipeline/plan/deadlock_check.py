"""An order in which the ranks' steps can run, as their messages permit."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from tfdist.errors import ScheduleError
from tfdist.pipeline.plan.action import Action, Value
from tfdist.pipeline.plan.transfer import Receive, Send, Step


def walk(
    program: Sequence[Sequence[Step]], capacity: int | None = None
) -> Iterator[tuple[int, Step]]:
    """Goes through the steps of all ranks at once.

    A rank takes its steps in their order. A receive does not wait; the action that takes the value
    does. What a rank sends to another arrives in the order in which it is sent. The ranks go in
    turns of one action, so the order is about that of the time if all actions take the same.

    Args:
        program: of `lower`.
        capacity: how many messages of a channel wait for their receive at most; a send beyond that
            waits. By default no send does.

    Yields:
        A rank, and the step that it takes.

    Raises:
        ScheduleError: the ranks wait for one another.
    """
    state = _State(program, capacity)
    moved = True
    while moved:
        moved = False
        for rank in range(len(program)):
            for step in state.turn(rank):
                yield rank, step
                moved = True
    stuck = [rank for rank in range(len(program)) if state.left(rank)]
    if stuck:
        raise ScheduleError(state.circle(stuck[0]))


class _State:
    """How far the ranks and their channels have come."""

    def __init__(self, program: Sequence[Sequence[Step]], capacity: int | None) -> None:
        self._program = program
        self._capacity = capacity
        self._position = [0] * len(program)
        # By (sending rank, receiving rank), messages so far.
        self._sent: dict[tuple[int, int], int] = defaultdict(int)
        self._received: dict[tuple[int, int], int] = defaultdict(int)
        # By rank and what its actions take: the receives for it, and their numbers on the channel.
        self._incoming: list[dict[Value | None, list[tuple[Receive, int]]]] = [
            defaultdict(list) for _ in program
        ]

    def left(self, rank: int) -> bool:
        """Whether a rank has steps left."""
        return self._position[rank] < len(self._program[rank])

    def obstacle(self, rank: int) -> Send | Receive | None:
        """The transfer for which a rank has to wait at its next step."""
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

    def turn(self, rank: int) -> Iterator[Step]:
        """Takes a rank's next steps, one action at most and what comes before and after it."""
        acted = False
        while self.left(rank) and self.obstacle(rank) is None:
            step = self._program[rank][self._position[rank]]
            if acted and isinstance(step, Action):
                return
            acted = acted or isinstance(step, Action)
            self._take(rank, step)
            yield step

    def _take(self, rank: int, step: Step) -> None:
        self._position[rank] += 1
        if isinstance(step, Send):
            self._sent[rank, step.peer] += 1
        elif isinstance(step, Receive):
            channel = (step.peer, rank)
            self._incoming[rank][step.value].append((step, self._received[channel]))
            self._received[channel] += 1

    def circle(self, rank: int) -> str:
        """Why nobody can go on, from a rank that waits."""
        waits: dict[int, str] = {}
        while rank not in waits and self.left(rank):
            obstacle = self.obstacle(rank)
            if obstacle is None:
                break
            step = self._program[rank][self._position[rank]]
            at = "" if step is obstacle else f" at {step}"
            waits[rank] = f"rank {rank} waits{at} to {obstacle}"
            rank = obstacle.peer
        return "The ranks wait for one another: " + ", ".join(waits.values()) + "."
