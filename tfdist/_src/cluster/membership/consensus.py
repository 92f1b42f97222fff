"""Single-decree Paxos for each generation: the members of a view decide on the next one.

This module uses no sockets, threads, clocks or random numbers: messages in, messages out. An
acceptor is the set of promises and votes of one member (`AcceptorState`). A proposer is one attempt
of a member to have a view decided (`Proposer`). The last state of a dead member is read from its
record, and counts as an answer that can no longer change.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from tfdist._src.cluster.membership.view import View


def may_go_on(view: Sequence[str], present: Collection[str], dead: Collection[str]) -> bool:
    """Whether some members of a view may decide on the next one.

    Members do not count if they are dead for certain and their last word is known. Of the others,
    more than half may decide, or exactly half if they include the first one, which breaks the tie.

    No two decisions can contradict each other. A last word binds a proposer just as an answer does;
    if it contains a promise to a higher ballot, the attempt that reads it fails. So only the
    members that neither decision counts as dead matter: each decision has more than half of these
    members, or both have the same half. A dead member with an unknown last word still counts,
    because another group may already exist: the member may have admitted newcomers while a member
    that is present here was suspended or disconnected.

    Args:
        view: the members of the view, in rank order.
        present: the members that participate in the decision.
        dead: the members that are dead for certain, with a known last word.

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
    """Whether the members present can never decide, regardless of how long they wait.

    Args:
        view: the members of the view, in rank order.
        present: the members that participate in the decision.
        dead: the members that are dead for certain, with a known last word.
        gone: the members that are dead for certain, with a lost last word.

    Example:
        >>> is_hopeless("ab", "b", "", "a"), is_hopeless("ab", "b", "", "")
        (True, False)
    """
    known = {*present, *dead, *gone}
    # Any other member may still appear, either as present or as dead with its last word.
    others = {member for member in view if member not in known}
    return not may_go_on(view, {*present, *others}, dead) and not may_go_on(
        view, present, {*dead, *others}
    )


@dataclass(frozen=True, order=True)
class Ballot:
    """The number of an attempt; a member that has promised a ballot refuses all lower ones.

    Attributes:
        round: counts up.
        rank: the proposer's rank, so that ballots are unique.
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
    """Asks a member to promise to refuse lower ballots, and to report its vote."""

    view: View
    ballot: Ballot


@dataclass(frozen=True)
class Accept:
    """Asks a member of a view to vote for the next one."""

    view: View
    ballot: Ballot
    proposal: View


@dataclass(frozen=True)
class Promise:
    """The member participates in a ballot, and reports its vote, if any."""

    ballot: Ballot
    accepted: Vote | None


@dataclass(frozen=True)
class Accepted:
    """The member has accepted the proposal."""

    ballot: Ballot


@dataclass(frozen=True)
class Refused:
    """The member has promised a higher ballot."""

    ballot: Ballot
    promised: Ballot


@dataclass(frozen=True)
class Decided:
    """A view that has been decided, of the requested generation or a later one."""

    view: View


Request = Prepare | Accept
Reply = Promise | Accepted | Refused | Decided


@dataclass(frozen=True)
class AcceptorState:
    """The state of a process as an acceptor; immutable, and replaced at each change.

    Attributes:
        view: the last decided view known here that includes this process; None while the process
            waits to be admitted.
        promised: the lowest ballot that it does not refuse, for the next generation.
        accepted: its vote for the next generation.
        excluded: a later view, decided without this process.
    """

    view: View | None = None
    promised: Ballot = NONE
    accepted: Vote | None = None
    excluded: View | None = None

    def learn(self, view: View, me: str) -> AcceptorState:
        """Returns the state after a process has learned of a decided view."""
        if view.rank(me) is None:
            known = self.excluded or self.view
            # A process that waits to be admitted is not excluded by a view without it.
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

    It may propose a view once a quorum has promised (`may_go_on`), and decides once a quorum has
    accepted. The caller chooses for which other members to wait before it proposes, and how long.

    Args:
        view: the present view; its members decide on the next one.
        ballot: the attempt.

    Attributes:
        decided: the outcome, if any; it may be of another attempt, or of a later generation.
        overruled: a higher ballot that has made this attempt futile, if any.
        promised: the members that have promised.
        accepted: the members that have accepted.
        dead: the members that are dead for certain, with a known last word.
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
        """The request to send: `Prepare` to all members, then `Accept` to members that promised."""
        if self.proposal is None:
            return Prepare(self.view, self.ballot)
        return Accept(self.view, self.ballot, self.proposal)

    @property
    def may_propose(self) -> bool:
        """Whether enough members have promised."""
        return may_go_on(self.view.incarnations, self.promised, self.dead)

    @property
    def bound(self) -> View | None:
        """The view that must be proposed, because it may already be decided; None for any view."""
        return self._bound.view if self._bound else None

    def propose(self, view: View) -> None:
        """Proposes a view; if `bound` is not None, proposes that view instead.

        Raises:
            ValueError: too few members have promised, or a view has already been proposed.
        """
        if not self.may_propose or self.proposal is not None:
            raise ValueError("a view may be proposed once, when enough members take part")
        self.proposal = self.bound or view

    def receive(self, member: str, reply: Reply) -> None:
        """Processes a member's reply; replies may arrive in any order, and repeatedly."""
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
        """Processes the last word of a member that is dead for certain."""
        view = last_word.view
        if view is None or view.generation < self.view.generation:
            last_word = AcceptorState(self.view)  # the member did not know of the view
        elif view.generation > self.view.generation:
            self._decide(view)
            return
        if last_word.excluded and last_word.excluded.generation > self.view.generation:
            self._decide(last_word.excluded)
            return
        # The member cannot promise any more, but it may have promised a higher ballot than this.
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
    """Returns the lowest ballot of a proposer that is higher than all known ones.

    Example:
        >>> next_ballot(2, [Ballot(4, 3)])
        Ballot(round=5, rank=2)
    """
    return Ballot(1 + max((ballot.round for ballot in known), default=-1), rank)
