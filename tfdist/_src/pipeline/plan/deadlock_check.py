"""Finds an order in which the ranks' steps can run, or the cycle in which they deadlock."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from tfdist._src.pipeline.plan.action import Action, Value
from tfdist._src.pipeline.plan.instructions import Receive, Send, Step
from tfdist.errors import ScheduleError


def walk(
    program: Sequence[Sequence[Step]], capacity: int | None = None
) -> Iterator[tuple[int, Step]]:
    """Walks through the steps of all ranks concurrently.

    Each rank runs its steps in order. A receive does not block; the action that consumes the value
    does. Messages from one rank to another arrive in the order in which they are sent. Ranks take
    turns of one action, so the order is roughly chronological if all actions take equally long.

    Args:
        program: as returned by `lower`.
        capacity: the maximum number of messages in a channel that wait for their receive; a further
            send blocks. By default, no send blocks.

    Yields:
        A rank, and the step that it runs.

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
        # By rank and consumed value: its receives, and their indices on the channel.
        self._incoming: list[dict[Value | None, list[tuple[Receive, int]]]] = [
            defaultdict(list) for _ in program
        ]

    def left(self, rank: int) -> bool:
        """Whether a rank has steps left."""
        return self._position[rank] < len(self._program[rank])

    def blocker(self, rank: int) -> Send | Receive | None:
        """The transfer that a rank's next step must wait for; None if it can run."""
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
