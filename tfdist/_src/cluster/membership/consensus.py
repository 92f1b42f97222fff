"""Decides on the next view of a group: the members of a view run single-decree Paxos.

This module only computes the reply to each message. It uses no sockets, threads, clocks or random
numbers. An acceptor is a member that promises and votes; `AcceptorState` contains its promises and
votes. A proposer is one attempt of a member to get a view decided (`Proposer`). The last word of a
member is its last `AcceptorState`. If the member is dead, the others read its last word from its
record. A last word counts as the final answer of the member.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from tfdist._src.cluster.membership.view import View


def may_go_on(view: Sequence[str], present: Collection[str], dead: Collection[str]) -> bool:
    """Whether the members that are present form a quorum, which may decide on the next view.

    The quorum is computed without the members in `dead`. More than half of the remaining members
    form a quorum. Exactly half of them form a quorum if this half contains the first remaining
    member.

    Two decisions can never contradict each other, even if they count different members as dead. A
    last word restricts a proposer in the same way as an answer. If the last word contains a promise
    to a higher ballot, the attempt of the proposer fails. It is therefore sufficient to consider
    the members that both decisions count as alive. Each of the two decisions was made by more than
    half of these members, or both decisions were made by the same half.

    A dead member with an unknown last word still counts as a member. Before its death, this member
    may have formed another group with newcomers, while a member that is now present was suspended
    or disconnected.

    Args:
        view: the members of the view, in rank order.
        present: the members that participate in the decision.
        dead: the members that are known to be dead and have a known last word.

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
    """Whether the members that are present can never become a quorum, even if they wait longer.

    Args:
        view: the members of the view, in rank order.
        present: the members that participate in the decision.
        dead: the members that are known to be dead and have a known last word.
        gone: the members that are known to be dead and have lost their last word.

    Example:
        >>> is_hopeless("ab", "b", "", "a"), is_hopeless("ab", "b", "", "")
        (True, False)
    """
    known = {*present, *dead, *gone}
    # Each other member may still arrive, or turn out to be dead with a known last word.
    others = {member for member in view if member not in known}
    return not may_go_on(view, {*present, *others}, dead) and not may_go_on(
        view, present, {*dead, *others}
    )


@dataclass(frozen=True, order=True)
class Ballot:
    """The number of a proposer's attempt, by which attempts are ordered.

    A member that has promised a ballot refuses all requests with a lower ballot.

    Attributes:
        round: the number of the round. Each new attempt uses a higher round than all known ballots.
        rank: the proposer's rank, so that two proposers never use the same ballot.
    """

    round: int
    rank: int


NONE = Ballot(-1, -1)
"""A ballot that is lower than every ballot that a member proposes."""


@dataclass(frozen=True)
class Vote:
    """A view that a member has accepted.

    Attributes:
        ballot: the ballot of the attempt that proposed the view.
        view: the proposed view.
    """

    ballot: Ballot
    view: View


@dataclass(frozen=True)
class Prepare:
    """Asks a member to refuse all lower ballots from now on, and to report its vote."""

    view: View
    ballot: Ballot


@dataclass(frozen=True)
class Accept:
    """Asks a member of `view` to vote for `proposal` as the next view."""

    view: View
    ballot: Ballot
    proposal: View


@dataclass(frozen=True)
class Promise:
    """The reply of a member that promises to refuse lower ballots and reports its vote, if any."""

    ballot: Ballot
    accepted: Vote | None


@dataclass(frozen=True)
class Accepted:
    """The reply of a member that has accepted the proposal."""

    ballot: Ballot


@dataclass(frozen=True)
class Refused:
    """The reply of a member that has already promised a higher ballot."""

    ballot: Ballot
    promised: Ballot


@dataclass(frozen=True)
class Decided:
    """The reply of a member that knows a decided view of the requested or a later generation."""

    view: View


Request = Prepare | Accept
Reply = Promise | Accepted | Refused | Decided


@dataclass(frozen=True)
class AcceptorState:
    """The promises and votes of a process. Each change creates a new object.

    Attributes:
        view: the latest decided view that the process knows and belongs to. None while the process
            waits to be admitted.
        promised: the highest ballot for the next generation that the process has promised. The
            process refuses lower ballots.
        accepted: the vote of the process for the next generation, if any.
        excluded: a decided view that is later than `view` and does not contain the process, if any.
    """

    view: View | None = None
    promised: Ballot = NONE
    accepted: Vote | None = None
    excluded: View | None = None

    def learn(self, view: View, me: str) -> AcceptorState:
        """Returns the state of the process `me` after it has learned of a decided view."""
        if view.rank(me) is None:
            known = self.excluded or self.view
            # A process that still waits to be admitted does not count as excluded from a view.
            if self.view is None or (known and known.generation >= view.generation):
                return self
            return replace(self, excluded=view)
        if self.view is not None and self.view.generation >= view.generation:
            return self
        return AcceptorState(view)

    def answer(self, request: Request, me: str) -> tuple[AcceptorState, Reply | None]:
        """Answers a proposer.

        Args:
            request: the proposer's message.
            me: the incarnation of this process.

        Returns:
            The new state, and the reply. The reply is None if the request concerns a view that this
            process does not belong to.
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
    """One attempt of a member to get the next view decided.

    A view may be proposed once a quorum of members has promised the ballot (see `may_go_on`). The
    view is decided once a quorum of members has accepted it. The caller may wait for more promises
    before it calls `propose`.

    Args:
        view: the current view. Its members decide on the next view.
        ballot: the ballot of this attempt.

    Attributes:
        decided: the decided view, if any. Another attempt may have decided this view, and its
            generation may be later than the next one.
        overruled: the higher ballot of another attempt, if a member has promised such a ballot.
            This attempt can then no longer succeed.
        promised: the members that have promised this ballot.
        accepted: the members that have accepted the proposal.
        dead: the members that are known to be dead and have a known last word.
        proposal: the proposed view, if any.
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
        """The next request: `Prepare` for all members, then `Accept` for members that promised."""
        if self.proposal is None:
            return Prepare(self.view, self.ballot)
        return Accept(self.view, self.ballot, self.proposal)

    @property
    def may_propose(self) -> bool:
        """Whether enough members have promised."""
        return may_go_on(self.view.incarnations, self.promised, self.dead)

    @property
    def bound(self) -> View | None:
        """The view that must be proposed; None if the proposer may propose any view.

        This is the view of the vote with the highest ballot that the members have reported. An
        earlier attempt may already have decided it.
        """
        return self._bound.view if self._bound else None

    def propose(self, view: View) -> None:
        """Proposes `bound` if it is not None, or else `view`.

        Raises:
            ValueError: too few members have promised, or a view has already been proposed.
        """
        if not self.may_propose or self.proposal is not None:
            raise ValueError("a view may be proposed once, when enough members take part")
        self.proposal = self.bound or view

    def receive(self, member: str, reply: Reply) -> None:
        """Processes a member's reply. Replies may arrive in any order and more than once."""
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
        """Processes the last word of a member that is known to be dead."""
        view = last_word.view
        if view is None or view.generation < self.view.generation:
            last_word = AcceptorState(self.view)  # it died before it learned of the view
        elif view.generation > self.view.generation:
            self._decide(view)
            return
        if last_word.excluded and last_word.excluded.generation > self.view.generation:
            self._decide(last_word.excluded)
            return
        # The dead member makes no more promises, but it may already have promised a higher ballot.
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
    """Returns a ballot that is higher than all known ballots.

    Args:
        rank: the rank of the proposer that uses the ballot.
        known: the ballots that the proposer knows.

    Example:
        >>> next_ballot(2, [Ballot(4, 3)])
        Ballot(round=5, rank=2)
    """
    return Ballot(1 + max((ballot.round for ballot in known), default=-1), rank)
