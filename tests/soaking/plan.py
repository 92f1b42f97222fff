"""Which faults come when: random by a seed, and none that no group could survive."""

from __future__ import annotations

import random
from dataclasses import dataclass

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
    """

    size: int
    view: int
    silent: int = 0
    oldest: bool = True

    def settle(self) -> None:
        """Those that are left have formed a group."""
        self.view, self.silent, self.oldest = self.size, 0, True

    def without(self, position: int, silent: bool) -> Group:
        """What is left without a member."""
        return Group(self.size - 1, self.view, self.silent + silent, self.oldest and position != 0)

    def may_go_on(self) -> bool:
        """Whether those that are left may: a silent one may be training with the rest."""
        if not self.silent:
            return True  # All that is missing is known to be dead.
        return 2 * self.size > self.view or (2 * self.size == self.view and self.oldest)


def make_plan(seed: int, *, steps: int, start: int, least: int, most: int) -> list[Event]:
    """Events in the order of their steps.

    Args:
        seed: the same one gives the same plan.
        steps: of the training; nothing happens after nine tenths of them.
        start: workers at first.
        least: workers that the group needs.
        most: workers that it may have.
    """
    numbers = random.Random(seed)
    group = Group(start, start)
    events: list[Event] = []
    step = numbers.randrange(2, 10)
    while step < 0.9 * steps:
        kind = numbers.choice(KINDS)
        if kind == "join":
            if group.size < most:
                # Those who join come when the group has settled, by the rules of joining.
                step += max(GAPS) if not group.may_go_on() else 0
                group.size += 1
                group.settle()
                events.append(Event(step, kind))
        elif group.size > least:
            position = numbers.randrange(group.size)
            left = group.without(position, silent=kind == "stop")
            if left.may_go_on():
                group = left
                wakes = kind == "stop" and numbers.random() < 0.5
                events.append(Event(step, kind, position, wakes))
        gap = numbers.choice(GAPS)
        if gap:
            group.settle()
        step += gap
    return events
