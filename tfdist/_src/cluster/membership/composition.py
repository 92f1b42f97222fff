"""Pure decisions around a regroup: who proposes, whom to wait for, and who belongs to a view."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from tfdist._src.cluster.membership.view import Member, View


class State(Enum):
    """What a proposer knows of another member."""

    AWAITED = "awaited"
    ANSWERED = "answered"
    DEAD = "dead"
    """Dead for certain, and its last word is known."""
    GONE = "gone"
    """Dead for certain, but its last word is lost."""
    LOST = "lost"
    """It has not answered for so long that nobody waits for it any more."""


@dataclass(frozen=True)
class Patience:
    """How long to wait for a member that does not answer.

    Attributes:
        refused: seconds for which its address may refuse connections while nobody sees it alive:
            while workers connect to one another, nobody listens there.
        silent: seconds for which it may be silent; it may be stopped, or cut off.
        unseen: the same for one that nobody sees alive; None for no other limit.
    """

    refused: float
    silent: float
    unseen: float | None = None


@dataclass(frozen=True)
class Evidence:
    """What is known of a member, in seconds of any clock.

    Attributes:
        answered: whether it has answered.
        dead: whether it is dead for certain.
        last_word: whether its last word is known.
        refused_since: since when its address has refused connections; None if it has not.
        silent_since: since when it has been silent; None if it has not.
        alive: whether a process of its machine, asked last, has seen it alive.
        sought: whether processes of its machine have been asked.
    """

    answered: bool = False
    dead: bool = False
    last_word: bool = False
    refused_since: float | None = None
    silent_since: float | None = None
    alive: bool = False
    sought: bool = False

    def state(self, now: float, patience: Patience) -> State:
        """What to do about the member.

        Example:
            >>> patience = Patience(refused=1.0, silent=60.0)
            >>> Evidence(refused_since=10.0, silent_since=9.0).state(10.5, patience)
            <State.AWAITED: 'awaited'>
            >>> Evidence(refused_since=10.0, silent_since=9.0).state(11.0, patience)
            <State.LOST: 'lost'>
        """
        if self.answered:
            return State.ANSWERED
        if self.dead:
            return State.DEAD if self.last_word else State.GONE
        silence = now - self.silent_since if self.silent_since is not None else 0.0
        if silence >= patience.silent:
            return State.LOST
        unseen = self.sought and patience.unseen is not None and silence >= patience.unseen
        if (unseen or self.is_refused(now, patience)) and not self.alive:
            return State.LOST
        return State.AWAITED

    def is_refused(self, now: float, patience: Patience) -> bool:
        """Whether its address has refused connections for too long."""
        return self.refused_since is not None and now - self.refused_since >= patience.refused


def leader(view: View, lost: Collection[str]) -> Member | None:
    """Who proposes: the member of the lowest rank that is not lost; None if all are.

    Args:
        view: the view whose members decide.
        lost: the incarnations of those that do not answer.
    """
    return next((one for one in view.members if one.incarnation not in lost), None)


def all_accounted_for(states: Iterable[State]) -> bool:
    """Whether there is no member left to wait for."""
    return State.AWAITED not in states


def compose(
    view: View,
    promised: Collection[str],
    joiners: Sequence[Member],
    max_workers: int | None,
) -> View:
    """The view to propose: the members that take part in their order, then those that wait.

    A newcomer replaces a member that has its address, if that one does not take part.

    Args:
        view: the view whose members decide.
        promised: the incarnations of those that take part.
        joiners: those that wait to be admitted, in order of arrival.
        max_workers: the largest size to which newcomers may raise the group.
    """
    members = [one for one in view.members if one.incarnation in promised]
    taken = {one.worker.address for one in members}
    for joiner in joiners:
        if max_workers is not None and len(members) >= max_workers:
            break
        if joiner.worker.address not in taken and joiner.incarnation not in view.incarnations:
            members.append(joiner)
            taken.add(joiner.worker.address)
    return View(view.generation + 1, tuple(members))


def names(view: View, states: Mapping[str, State], wanted: Collection[State]) -> list[str]:
    """The members of a view that are in one of some states."""
    return [str(m) for m in view.members if states.get(m.incarnation) in wanted]
