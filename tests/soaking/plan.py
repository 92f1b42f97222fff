"""Which faults come when: random by a seed, and none that no group could survive."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

KINDS = ("kill", "stop", "leave", "join")
# Steps between two events; 0 is for one that comes during the recovery from another.
GAPS = (0, 1, 2, 5, 10, 20)


@dataclass(frozen=True)
class Event:
    """Something that happens to the group.

    Attributes:
        step: once the group has ended it.
        kind: one of `KINDS`.
        position: of the worker in the group, by age, from 0; -1 for one that joins.
        wakes: whether a stopped worker goes on once the others have given it up; it is killed
            otherwise.
    """

    step: int
    kind: str
    position: int = -1
    wakes: bool = False


@dataclass
class Group:
    """The members by age, as the plan foresees them.

    Attributes:
        size: members that are there.
        view: members that the last group which trained had.
        silent: those of that group that were stopped since.
        oldest: whether its first member is there.
        joining: those who want to join; they are the last ones by age.
    """

    size: int
    view: int
    silent: int = 0
    oldest: bool = True
    joining: int = 0

    @property
    def all(self) -> int:
        """Members and those who want to join."""
        return self.size + self.joining

    def settle(self) -> None:
        """Those that are left, and those who have joined, have formed a group."""
        self.size, self.joining = self.all, 0
        self.view, self.silent, self.oldest = self.size, 0, True

    def without(self, position: int, silent: bool) -> Group:
        """What is left without the one at a position."""
        if position >= self.size:
            return replace(self, joining=self.joining - 1)
        oldest = self.oldest and position != 0
        return replace(self, size=self.size - 1, silent=self.silent + silent, oldest=oldest)

    def may_go_on(self) -> bool:
        """Whether those that are left may: a silent one may be training with the rest."""
        if not self.size:
            return False  # Those who want to join know nothing of the training.
        if not self.silent:
            return True  # All that is missing is known to be dead.
        return 2 * self.size > self.view or (2 * self.size == self.view and self.oldest)


def make_plan(seed: int, *, steps: int, start: int, least: int, most: int) -> list[Event]:
    """Events in the order of their steps.

    Args:
        seed: the same one gives the same plan.
        steps: of the training; nothing happens after seven tenths of them.
        start: workers at first.
        least: workers that the group needs.
        most: workers that it may have.
    """
    numbers = random.Random(seed)
    group = Group(start, start)
    events: list[Event] = []
    step = numbers.randrange(2, 10)
    while step < 0.7 * steps:
        kind = numbers.choice(KINDS)
        if kind == "join":
            if group.all < most:
                group.joining += 1
                events.append(Event(step, kind))
        elif group.all > least:
            position = numbers.randrange(group.all)
            left = group.without(position, silent=kind == "stop")
            # Who is stopped before it has joined would come later.
            early = kind == "stop" and position >= group.size
            if left.may_go_on() and not early:
                group = left
                wakes = kind == "stop" and numbers.random() < 0.5
                events.append(Event(step, kind, position, wakes))
        gap = numbers.choice(GAPS)
        if gap:
            group.settle()
        step += gap
    return events
