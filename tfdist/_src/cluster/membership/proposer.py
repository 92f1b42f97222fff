"""Proposes the next view: connects a Paxos proposer to the other members."""

import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace

from tfdist._src.cluster.membership import consensus
from tfdist._src.cluster.membership.calls import Calls
from tfdist._src.cluster.membership.contact import MemberProbe
from tfdist._src.cluster.membership.node import Node
from tfdist._src.cluster.membership.view import (
    Member,
    Patience,
    State,
    View,
    all_accounted_for,
    compose,
    names,
)
from tfdist._src.cluster.membership.wire import decode_reply, encode_request
from tfdist._src.cluster.net.framing import Header, WireError
from tfdist._src.cluster.net.wait_messages import Announce, WaitMessages
from tfdist.errors import GroupLostError

POLL_SECONDS = 0.05
"""The interval of checks that depend only on time; events are noticed immediately."""


@dataclass(frozen=True)
class FormationPolicy:
    """The conditions for forming a new group.

    Attributes:
        min_workers: the minimum size of the group.
        max_workers: the maximum size up to which newcomers are admitted; None for no limit.
        joiners_welcome: whether waiting processes are admitted.
        timeout: seconds to wait until enough workers have arrived.
        busy: seconds to wait for a worker that is alive but busy.
        patience: how long to wait for a member that does not answer.
        hasty: a shorter limit in seconds. It applies to members in `silent`, and to members in
            `suspects` if no process sees them alive.
        suspects: the incarnations of the members that have lost their connections.
        silent: the incarnations of the members that have already been silent for a long time, for
            example because they are suspended.
        check: called repeatedly during each wait. An error that it raises ends the wait.
    """

    min_workers: int
    max_workers: int | None
    joiners_welcome: bool
    timeout: float
    busy: float
    patience: Patience
    hasty: float
    suspects: frozenset[str] = frozenset()
    silent: frozenset[str] = frozenset()
    check: Callable[[], object] = lambda: None

    def patience_with(self, member: Member) -> Patience:
        """Returns how long to wait for this member if it does not answer."""
        if member.incarnation in self.silent:
            return replace(self.patience, silent=self.hasty)
        if member.incarnation in self.suspects:
            return replace(self.patience, unseen=self.hasty)
        return self.patience


class ProposalRound:
    """One attempt of this process to get the next view decided, with one ballot.

    Args:
        node: the state of this process as a member.
        calls: sends the requests to the other members.
        view: the current view. Its members decide on the next view.
        terms: the conditions for forming the group.
        extra: the fields to add to each request.
        absent: the members that have not arrived in time. This maps the incarnation of each such
            member to the reason. These members may vote, but they are not part of the next view.
            The other members must be a majority without them. Otherwise, a single impatient member
            could exclude most of the group.
        deadline: the `time.monotonic()` at which the attempt times out.
        announce: called with each progress message.
    """

    def __init__(
        self,
        node: Node,
        calls: Calls,
        view: View,
        terms: FormationPolicy,
        extra: Header,
        absent: Mapping[str, str],
        deadline: float,
        announce: Announce,
    ) -> None:
        self._node = node
        self._calls = calls
        self._view = view
        self._terms = terms
        self._extra = extra
        self._absent = absent
        self._deadline = deadline
        self._announce = announce
        rank = view.rank(node.me)
        assert rank is not None
        self._proposer = consensus.Proposer(view, consensus.next_ballot(rank, [node.seen]))
        self._contacts: dict[str, MemberProbe] = {}
        self._waits = WaitMessages(node.member.worker, terms.timeout, announce)
        self._states: dict[str, State] = {}
        self._next = view

    def run(self) -> consensus.Ballot | None:
        """Makes the attempt.

        Returns:
            None if this process has learned of a decided view. If the attempt failed because of a
            higher ballot of another attempt, the result is that ballot. If the attempt failed
            because too few members accepted the proposal, the result is the ballot of this attempt,
            and the caller should try again.

        Raises:
            GroupLostError: there is no quorum, or too few workers have arrived in time.
        """
        proposer = self._proposer
        try:
            self._ask(self._view.members)
            if not self._until(self._can_propose):
                return proposer.overruled
            self._stop()
            others = [m for m in self._view.members if m.incarnation in proposer.promised]
            proposer.propose(self._next)
            before = self._states
            self._ask(others)
            if not self._until(self._is_futile) or proposer.decided:
                self._tell(before)
                return None if proposer.decided else proposer.overruled
            return proposer.ballot
        finally:
            self._stop()

    def _ask(self, members: Iterable[Member]) -> None:
        node, request = self._node, self._proposer.request
        header = {**encode_request(request), **self._extra}
        if reply := node.answer(request):
            self._proposer.receive(node.me, reply)
        self._states = {}
        self._contacts = {
            member.incarnation: MemberProbe(
                node,
                self._calls,
                member,
                header,
                lambda frame: True,
                self._terms.patience_with(member),
                self._witnesses,
            )
            for member in members
            if member.incarnation != node.me
        }

    def _stop(self) -> None:
        for contact in self._contacts.values():
            contact.stop()

    def _until(self, condition: Callable[[], bool]) -> bool:
        """Waits for a condition; returns False if a view was decided or the attempt has failed."""
        node, proposer = self._node, self._proposer
        with node.changed:
            while True:
                self._absorb()
                view = node.view
                if proposer.decided:
                    node.learn(proposer.decided)
                    return False
                if proposer.overruled:
                    node.heard_of(proposer.overruled)
                    return False
                if node.acceptor.excluded or view is None or view != self._view:
                    proposer.decided = node.acceptor.excluded or view
                    return False
                if condition():
                    return True
                if time.monotonic() >= self._deadline:
                    raise GroupLostError(self._why_not("in time"))
                self._terms.check()
                self._waits.report(self._waiting)
                node.changed.wait(POLL_SECONDS)

    def _absorb(self) -> None:
        now = time.monotonic()
        for incarnation, contact in self._contacts.items():
            state = contact.evidence.state(now, self._terms.patience_with(contact.member))
            if state is State.ANSWERED and contact.answer is not None:
                try:
                    reply = decode_reply(contact.answer)
                except WireError:
                    reply = None
                if reply is not None:
                    self._proposer.receive(incarnation, reply)
            elif state is State.DEAD and contact.last_word is not None:
                self._proposer.bury(incarnation, contact.last_word)
            self._states[incarnation] = state

    def _can_propose(self) -> bool:
        if not all_accounted_for(self._states.values()):
            return False
        proposer = self._proposer
        if proposer.may_propose:
            if not (proposer.bound or self._rest_may_decide):
                raise GroupLostError(self._why_not_without_the_absent())
            self._next = self._candidate()
            return len(self._next.members) >= self._terms.min_workers or bool(proposer.bound)
        gone = [name for name, state in self._states.items() if state is State.GONE]
        if consensus.is_hopeless(self._view.incarnations, proposer.promised, proposer.dead, gone):
            raise GroupLostError(self._why_not("any more"))
        return False

    def _is_futile(self) -> bool:
        """Whether no further answer can arrive; the attempt has then failed without a decision."""
        return all_accounted_for(self._states.values())

    def _candidate(self) -> View:
        terms = self._terms
        joiners = self._node.connected if terms.joiners_welcome else []
        return compose(self._view, self._rest, joiners, terms.max_workers)

    @property
    def _rest(self) -> set[str]:
        """The members that have promised the ballot, except those in `absent`."""
        return self._proposer.promised - self._absent.keys()

    @property
    def _rest_may_decide(self) -> bool:
        return consensus.may_go_on(self._view.incarnations, self._rest, self._proposer.dead)

    def _witnesses(self, member: Member) -> list[Member]:
        """Returns processes on the same machine, which can see whether the member is dead."""
        with self._node.changed:
            answered = [
                c.member for c in self._contacts.values() if c.evidence.answered and c.answer
            ]
            others = [*answered, *self._node.connected]
        return [one for one in others if one.place.machine == member.place.machine]

    def _waiting(self) -> str:
        proposer = self._proposer
        awaited = names(self._view, self._states, {State.AWAITED})
        if awaited:
            return f"{', '.join(awaited)} to form a new group"
        if proposer.may_propose:
            count = len(self._candidate().members)
            return f"workers to join: {count} of at least {self._terms.min_workers} are present"
        return f"more than half of the last group: missing {self._missing()}"

    def _missing(self) -> str:
        words = {
            State.LOST: "does not answer",
            State.DEAD: "is dead",
            State.GONE: "is dead, and its last agreement is unknown",
            State.AWAITED: "has not answered yet",
        }
        return ", ".join(
            f"{member} ({word})"
            for member in self._view.members
            if (word := words.get(self._states.get(member.incarnation, State.ANSWERED)))
            or (word := self._absent.get(member.incarnation))
        )

    def _why_not(self, until: str) -> str:
        proposer = self._proposer
        me, size = self._node.member, len(self._view.members)
        if proposer.may_propose:
            here = len(self._candidate().members)
            return (
                f"{me} cannot continue: {here} of at least {self._terms.min_workers} workers "
                f"remain after {self._terms.timeout:g} s; missing: {self._missing()}. Start "
                "workers to join, decrease min_workers, or increase TFDIST_START_TIMEOUT."
            )
        return (
            f"{me} cannot continue: {len(proposer.promised)} of {size} workers of the last group "
            f"are present, which is no majority {until}, and others may have formed a group "
            f"without them; missing: {self._missing()}. Restart the job from its last snapshot."
        )

    def _why_not_without_the_absent(self) -> str:
        here, size = len(self._rest), len(self._view.members)
        return (
            f"{self._node.member} cannot continue: {here} of {size} workers of the last group are "
            f"present, which is no majority without the others; missing: {self._missing()}. See "
            "their logs, or increase the limit."
        )

    def _tell(self, states: Mapping[str, State]) -> None:
        decided, proposal = self._proposer.decided, self._proposer.proposal
        if decided is not None and decided == proposal:
            said = [one for one in self._view.incarnations if self._node.last_word(one)]
            self._announce(summary(self._view, decided, states, said, self._absent))


def not_arrived(seconds: float, limit: str) -> str:
    """Returns the reason why a member counts as absent: it is alive, but did not arrive in time."""
    return f"has not arrived within {seconds:g} s, TFDIST_{limit}_TIMEOUT"


def summary(
    old: View,
    new: View,
    states: Mapping[str, State],
    said: Collection[str] = (),
    absent: Mapping[str, str] | None = None,
) -> str:
    """Returns the line that announces a new group.

    Args:
        old: the view of the old group.
        new: the view of the new group.
        states: maps the incarnations of the old members to their states.
        said: the incarnations of the old members that have left and sent their last word.
        absent: maps the incarnation of each member that has not arrived in time to the reason.
    """
    late = absent or {}
    words = {State.LOST: "does not answer", State.DEAD: "is dead", State.GONE: "is dead"}
    lost = [m for m in old.members if m.incarnation not in new.incarnations]
    came = [m for m in new.members if m.incarnation not in old.incarnations]

    def why(one: str) -> str:
        return words.get(states.get(one, State.LOST)) or late.get(one, "left")

    parts = [
        f"{member} has left"
        if member.incarnation in said
        else f"{member} is lost ({why(member.incarnation)})"
        for member in lost
    ]
    parts += [f"{member} joins" for member in came]
    kept = len(new.members) - len(came)
    parts.append(f"{kept} of {len(old.members)} workers form generation {new.generation}")
    size = f" of {len(new.members)} workers" if came else ""
    return f"{'; '.join(parts)}{size}"
