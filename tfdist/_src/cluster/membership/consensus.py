"""Single-decree Paxos for each generation: the members of a view decide on the next one.

Nothing here has a socket, a thread, a clock or a random number: messages in, messages out. The
acceptor is what each member has promised and accepted (`AcceptorState`); the proposer is one
attempt of a member to have a view decided (`Proposer`). What a dead member has promised and
accepted last is read from its record, and counts as an answer that can no longer change.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from tfdist._src.cluster.membership.view import View


def may_go_on(view: Sequence[str], present: Collection[str], dead: Collection[str]) -> bool:
    """Whether some members of a view may decide on the next one.

    Those that are dead for certain, and whose last word is known, do not count. Of the others, more
    than half may decide, or exactly half with the first one, which breaks the tie.

    Two decisions never miss each other. The dead have answered with their last word, which binds as
    an answer does; one that had taken part in a higher ballot before it died ends the attempt of
    whoever reads that. So what is left of two sets that may decide lies among those that neither
    counts as dead, of which each has more than half, or the same half. Without the last words,
    somebody might already go on: with newcomers whom the dead have admitted while one of those
    present was stopped or cut off.

    Args:
        view: the members of the view, in rank order.
        present: those that take part in the decision.
        dead: those that are dead for certain, and whose last word is known.

    Example:
        >>> may_go_on("abcd", "ab", ""), may_go_on("abcd", "cd", ""), may_go_on("abcd", "cd", "ab")
        (True, False, True)
    """
    left = [member for member in view if member in present or member not in dead]
    here = [member for member in left if member in present]
    if 2 * len(here) == len(left):
        return bool(here) and left[0] in present
    return 2 * len(here) > len(left)


def is_hopeless(
    view: Sequence[str], present: Collection[str], dead: Collection[str], gone: Collection[str]
) -> bool:
    """Whether those present can never go on, however long they wait.

    Args:
        view: the members of the view, in rank order.
        present: those that take part in the decision.
        dead: those that are dead for certain, and whose last word is known.
        gone: those that are dead for certain, and whose last word is lost.

    Example:
        >>> is_hopeless("ab", "b", "", "a"), is_hopeless("ab", "b", "", "")
        (True, False)
    """
    known = {*present, *dead, *gone}
    # One that is neither may yet turn up, as present or as dead with its last word.
    others = {member for member in view if member not in known}
    return not may_go_on(view, {*present, *others}, dead) and not may_go_on(
        view, present, {*dead, *others}
    )


@dataclass(frozen=True, order=True)
class Ballot:
    """The number of an attempt; of two, only the higher one can still succeed.

    Attributes:
        round: counts up.
        rank: that of the proposer, so that no two have the same ballot.
    """

    round: int
    rank: int


NONE = Ballot(-1, -1)
"""Lower than any ballot."""


@dataclass(frozen=True)
class Vote:
    """A view that a member has accepted.

    Attributes:
        ballot: the attempt.
        view: the view that was proposed.
    """

    ballot: Ballot
    view: View


@dataclass(frozen=True)
class Prepare:
    """Asks a member of a view to take part in no lower ballot, and for what it has accepted."""

    view: View
    ballot: Ballot


@dataclass(frozen=True)
class Accept:
    """Asks a member of a view to accept the next one."""

    view: View
    ballot: Ballot
    proposal: View


@dataclass(frozen=True)
class Promise:
    """Takes part in a ballot."""

    ballot: Ballot
    accepted: Vote | None


@dataclass(frozen=True)
class Accepted:
    """Has accepted what was proposed."""

    ballot: Ballot


@dataclass(frozen=True)
class Refused:
    """Has promised a higher ballot."""

    ballot: Ballot
    promised: Ballot


@dataclass(frozen=True)
class Decided:
    """A view that has been decided, of the generation asked for or a later one."""

    view: View


Request = Prepare | Accept
Reply = Promise | Accepted | Refused | Decided


@dataclass(frozen=True)
class AcceptorState:
    """The state of a process as an acceptor; a new one replaces it at each change.

    Attributes:
        view: the last view known here that has been decided and to which this process belongs; None
            for one that waits to be admitted.
        promised: the ballot below which it takes part in none, for the generation after the view.
        accepted: its vote for that generation.
        excluded: a later view, decided without this process.
    """

    view: View | None = None
    promised: Ballot = NONE
    accepted: Vote | None = None
    excluded: View | None = None

    def learn(self, view: View, me: str) -> AcceptorState:
        """The state once a process has learned of a decided view."""
        if view.rank(me) is None:
            known = self.excluded or self.view
            # One that waits to be admitted is not excluded by a view that does not have it.
            if self.view is None or (known and known.generation >= view.generation):
                return self
            return replace(self, excluded=view)
        if self.view is not None and self.view.generation >= view.generation:
            return self
        return AcceptorState(view)

    def answer(self, request: Request, me: str) -> tuple[AcceptorState, Reply | None]:
        """Answers a proposer.

        Args:
            request: its message.
            me: the incarnation of this process.

        Returns:
            The new state, and the reply; None if the request is not for this process.
        """
        after = self.learn(request.view, me)
        if after.view is None or request.view.rank(me) is None:
            return after, Decided(after.excluded) if after.excluded else None
        if after.excluded and after.excluded.generation > request.view.generation:
            return after, Decided(after.excluded)
        if after.view != request.view:
            later = after.view.generation > request.view.generation
            return after, Decided(after.view) if later else None
        if request.ballot < after.promised:
            return after, Refused(request.ballot, after.promised)
        if isinstance(request, Prepare):
            after = replace(after, promised=request.ballot)
            return after, Promise(request.ballot, after.accepted)
        vote = Vote(request.ballot, request.proposal)
        return replace(after, promised=request.ballot, accepted=vote), Accepted(request.ballot)


class Proposer:
    """One attempt of a member to have the next view decided.

    It goes on once it may, and never decides what it may not; whom to wait for beyond that, and how
    long, is up to the caller.

    Args:
        view: the view whose members decide.
        ballot: the attempt.

    Attributes:
        decided: the outcome, once there is one; possibly that of another attempt, and of a later
            generation.
        overruled: a higher ballot that has made this attempt futile, if there is one.
        promised: the members that take part.
        accepted: the members that have accepted.
        dead: the members that are dead for certain, and whose last word is known.
        proposal: what has been proposed.
    """

    def __init__(self, view: View, ballot: Ballot) -> None:
        self.view = view
        self.ballot = ballot
        self.decided: View | None = None
        self.overruled: Ballot | None = None
        self.promised: set[str] = set()
        self.accepted: set[str] = set()
        self.dead: set[str] = set()
        self.proposal: View | None = None
        self._bound: Vote | None = None

    @property
    def request(self) -> Request:
        """What to ask the members: all of them to prepare, then those that promised to accept."""
        if self.proposal is None:
            return Prepare(self.view, self.ballot)
        return Accept(self.view, self.ballot, self.proposal)

    @property
    def may_propose(self) -> bool:
        """Whether enough members take part."""
        return may_go_on(self.view.incarnations, self.promised, self.dead)

    @property
    def bound(self) -> View | None:
        """The view that must be proposed, since it may have been decided; None for any."""
        return self._bound.view if self._bound else None

    def propose(self, view: View) -> None:
        """Proposes a view, or the one that must be proposed.

        Raises:
            ValueError: too few members take part.
        """
        if not self.may_propose or self.proposal is not None:
            raise ValueError("a view may be proposed once, when enough members take part")
        self.proposal = self.bound or view

    def receive(self, member: str, reply: Reply) -> None:
        """Takes a member's reply; the order of replies does not matter, nor do repetitions."""
        if isinstance(reply, Decided):
            if reply.view.generation > self.view.generation:
                self._decide(reply.view)
        elif reply.ballot != self.ballot or self.view.rank(member) is None:
            return
        elif isinstance(reply, Refused):
            self._overrule(reply.promised)
        elif isinstance(reply, Promise) and self.proposal is None:
            self.promised.add(member)
            self._bind(reply.accepted)
        elif isinstance(reply, Accepted) and self.proposal is not None:
            self.accepted.add(member)
            self._check()

    def bury(self, member: str, last_word: AcceptorState) -> None:
        """Notes that a member is dead for certain, and what its state was."""
        view = last_word.view
        if view is None or view.generation < self.view.generation:
            last_word = AcceptorState(self.view)  # it has never heard of the view
        elif view.generation > self.view.generation:
            self._decide(view)
            return
        if last_word.excluded and last_word.excluded.generation > self.view.generation:
            self._decide(last_word.excluded)
            return
        # It cannot promise any more, but it may have promised a ballot that makes this one futile.
        if last_word.promised > self.ballot:
            self._overrule(last_word.promised)
            return
        self.promised.discard(member)
        self.dead.add(member)
        if self.proposal is None:
            self._bind(last_word.accepted)
        else:
            self._check()

    def _bind(self, vote: Vote | None) -> None:
        if vote and (self._bound is None or vote.ballot > self._bound.ballot):
            self._bound = vote

    def _check(self) -> None:
        if may_go_on(self.view.incarnations, self.accepted, self.dead) and self.proposal:
            self._decide(self.proposal)

    def _overrule(self, ballot: Ballot) -> None:
        self.overruled = max(self.overruled or NONE, ballot)

    def _decide(self, view: View) -> None:
        if self.decided is None or view.generation > self.decided.generation:
            self.decided = view


def next_ballot(rank: int, known: Sequence[Ballot]) -> Ballot:
    """The lowest ballot of a proposer above those that are known.

    Example:
        >>> next_ballot(2, [Ballot(4, 3)])
        Ballot(round=5, rank=2)
    """
    return Ballot(1 + max((ballot.round for ballot in known), default=-1), rank)
