"""Moves this process from one group to the next: decides on a view, then enters it."""

import time
from collections.abc import Callable, Iterator
from socket import socket

from tfdist._src.cluster.membership import proposer
from tfdist._src.cluster.membership.calls import Calls
from tfdist._src.cluster.membership.consensus import NONE, AcceptorState
from tfdist._src.cluster.membership.contact import MemberProbe
from tfdist._src.cluster.membership.node import Node
from tfdist._src.cluster.membership.view import (
    Member,
    State,
    View,
    decode_view,
    encode_member,
    encode_view,
    leader,
)
from tfdist._src.cluster.membership.wire import encode_acceptor
from tfdist._src.cluster.net.framing import Header, WireError
from tfdist._src.cluster.net.sockets import allow_descriptors
from tfdist._src.cluster.net.wait_messages import Announce, WaitMessages, named
from tfdist.errors import GroupLostError, TfdistError

_INQUIRY_SECONDS = 2.0
_FAREWELL_SECONDS = 2.0
_FAREWELLS_SECONDS = 3.0
"""The limit for all members together."""


def inquire(node: Node, calls: Calls) -> Iterator[str]:
    """Yields the reports of the other members; skips members that do not answer."""
    for other in node.others:
        header = {"kind": "inquire", "to": other.incarnation}
        try:
            answer = calls.ask(other.worker.address, header, _INQUIRY_SECONDS)
        except (OSError, WireError, TfdistError):
            continue
        if answer["kind"] == "told":
            yield str(answer["text"])


def say_farewell(node: Node, calls: Calls, last_word: AcceptorState) -> bool:
    """Sends another member this process's last word, and all last words received here.

    So the last member to leave knows the last words of all others.

    Returns:
        Whether no member needs this process's record any more.
    """
    header = {
        "kind": "farewell",
        "member": encode_member(node.member),
        "acceptor": encode_acceptor(last_word),
    }
    until = time.monotonic() + _FAREWELLS_SECONDS
    for other in node.others:
        seconds = min(_FAREWELL_SECONDS, until - time.monotonic())
        if seconds <= 0:
            break
        try:
            heard = {one: encode_acceptor(word) for one, word in node.last_words.items()}
            to = {**header, "heard": heard, "to": other.incarnation}
            answer = calls.ask(other.worker.address, to, seconds)
        except (OSError, WireError, TfdistError):  # that member also ends, or is busy
            continue
        if answer["kind"] != "other":
            return True
    return not node.others  # True if all their last words have arrived meanwhile.


_LOST = (State.DEAD, State.GONE, State.LOST)
_AGAIN_SECONDS = 0.5
_LET_IN_SECONDS = 20.0
_STAGGER_SECONDS = 0.1
_MAX_STAGGER_SECONDS = 10.0


class ViewEntry:
    """One attempt to enter a view.

    A member that has ended its attempt never enters this view afterward. So the members that have
    arrived may leave out a live member that has not arrived: no group of this view can form without
    all of its members, and a quorum of them decides on the next generation.

    Args:
        node: this process.
        calls: how to call the others.
        view: the view.
        terms: `patience`, `busy`, `timeout` and `check` are used.
        announce: called with lines that name the missing workers.

    Attributes:
        absent: incarnation -> reason, for members that have not arrived in time.
    """

    def __init__(
        self,
        node: Node,
        calls: Calls,
        view: View,
        terms: proposer.FormationPolicy,
        announce: Announce,
    ) -> None:
        self._node = node
        self._calls = calls
        self._view = view
        self._terms = terms
        # The first member to time out asks the others to form the next group. The deadlines are
        # staggered, so that two members seldom ask at the same time.
        stagger = min(_STAGGER_SECONDS * (view.rank(node.me) or 0), _MAX_STAGGER_SECONDS)
        self._deadline = time.monotonic() + terms.busy + stagger
        self.absent: dict[str, str] = {}
        self._waits = WaitMessages(node.member.worker, terms.busy, announce)
        self._contacts: list[MemberProbe] = []

    def run(self) -> dict[int, socket] | None:
        """Waits until all members have entered.

        Returns:
            The connections for the session; None if a member is lost meanwhile, has not arrived in
            time, or already forms the next group.

        Raises:
            GroupLostError: rank 0 has arrived and waits for others, but does not finish in time.
        """
        try:
            if len(self._view.members) == 1:
                return {}
            if self._view.rank(self._node.me) == 0:
                return self._receive()
            return self._arrive()
        finally:
            for contact in self._contacts:
                contact.stop()

    def _receive(self) -> dict[int, socket] | None:
        node, view = self._node, self._view
        allow_descriptors(len(view.members))
        header = {"kind": "decided", "view": encode_view(view)}
        others = view.members[1:]
        for member in others:
            # The member learns of the view, and this rank learns if the member dies.
            contact = self._contact(member, header, _is_answer, _AGAIN_SECONDS)
            self._contacts.append(contact)
        wanted = {member.incarnation for member in others}

        def missing() -> list[Member]:
            entered, here = node.entrants
            present = here if entered == view else frozenset()
            return [member for member in others if member.incarnation not in present]

        with node.changed:
            while absent := missing():
                self._listen()
                tokens = {member.incarnation for member in absent}
                lost = any(
                    self._is_lost(contact)
                    for contact in self._contacts
                    if contact.member.incarnation in tokens
                )
                if lost or self._is_over():
                    return None
                if self._is_late():
                    self.absent = dict.fromkeys(tokens, self._reason)
                    return None
                self._wait(lambda: named([member.worker for member in missing()]))
            node.sockets = {}
            node.go = view
            node.wake()
            self._deadline = time.monotonic() + _LET_IN_SECONDS
            while node.go is not None and not self._is_over() and not self._is_late():
                self._wait(lambda: "its connections")
            sockets, node.sockets, node.go = node.sockets, {}, None
        if set(sockets) != wanted:
            for sock in sockets.values():
                sock.close()
            return None
        ranks = {view.rank(incarnation): sock for incarnation, sock in sockets.items()}
        return {rank: sock for rank, sock in ranks.items() if rank is not None}

    def _listen(self) -> None:
        """Learns of later views from members that have continued without this process."""
        for contact in self._contacts:
            if contact.answer and contact.answer.get("view"):
                view = decode_view(contact.answer["view"])
                if view.generation > self._view.generation:
                    self._node.learn(view)

    def _arrive(self) -> dict[int, socket] | None:
        node, first = self._node, self._view.members[0]
        member = encode_member(node.member)
        header = {"kind": "enter", "view": encode_view(self._view), "member": member}
        here = noticed = False  # whether rank 0 has arrived

        def watch(frame: Header) -> bool:
            nonlocal here, noticed
            here = frame.get("here") is True
            if here and not noticed:
                # Rank 0 waits for the others for up to `busy` seconds, then forms the next group.
                noticed = True
                self._deadline = time.monotonic() + self._terms.busy + self._terms.timeout
            return frame["kind"] in ("go", "decided")

        contact = self._contact(first, header, watch, None)
        self._contacts.append(contact)
        with node.changed:
            while contact.answer is None:
                if self._is_lost(contact) or self._is_over():
                    return None
                if self._is_late():
                    if here:
                        raise self._error(first)
                    self.absent = {first.incarnation: self._reason}
                    return None
                self._wait(lambda: f"{first}, to form generation {self._view.generation}")
            answer, call = contact.answer, contact.call
        if answer["kind"] == "decided":
            node.learn(decode_view(answer.get("view")))
            return None
        assert call is not None
        return {0: call.take()}

    def _contact(
        self,
        member: Member,
        header: Header,
        is_last: Callable[[Header], bool],
        again: float | None,
    ) -> MemberProbe:
        return MemberProbe(
            self._node,
            self._calls,
            member,
            header,
            is_last,
            self._terms.patience_with(member),
            lambda other: [],
            again,
        )

    def _is_lost(self, contact: MemberProbe) -> bool:
        patience = self._terms.patience_with(contact.member)
        return contact.evidence.state(time.monotonic(), patience) in _LOST

    def _is_over(self) -> bool:
        """Whether another member already forms the next group."""
        acceptor = self._node.acceptor
        return acceptor.view != self._view or acceptor.promised != NONE or bool(acceptor.excluded)

    def _is_late(self) -> bool:
        return time.monotonic() >= self._deadline

    @property
    def _reason(self) -> str:
        return proposer.not_arrived(self._terms.busy, "COLLECTIVE")

    def _error(self, first: Member) -> GroupLostError:
        return GroupLostError(
            f"{self._node.member} cannot continue: {first} waits for others to form generation "
            f"{self._view.generation}, and has not finished within {self._terms.busy:g} s. See its "
            "log, or increase TFDIST_COLLECTIVE_TIMEOUT."
        )

    def _wait(self, whom: Callable[[], str]) -> None:
        self._terms.check()
        self._waits.report(whom)
        self._node.changed.wait(proposer.POLL_SECONDS)


def _is_answer(frame: Header) -> bool:
    return frame["kind"] in ("member", "decided")


_YIELD_SECONDS = 0.1


class Regrouping:
    """One call of `Membership.regroup`, or the admission of a newcomer.

    A live member may be too late to lead or to enter a view. The next view leaves it out if the
    others are a majority, and the member learns of that when it arrives.

    Args:
        node: this process, which belongs to a view.
        calls: how to call the others.
        terms: the conditions for forming the group.
        planned: whether all members call this on their own at the end of a step.
        reason: reported to the others if their steps have to be interrupted.
        announce: called with lines about the progress.
    """

    def __init__(
        self,
        node: Node,
        calls: Calls,
        terms: proposer.FormationPolicy,
        planned: bool,
        reason: str,
        announce: Announce,
    ) -> None:
        self._node = node
        self._calls = calls
        self._terms = terms
        self._planned = planned
        self._reason = reason
        self._announce = announce
        self._lost: set[str] = set()  # members that cannot lead
        self._absent: dict[str, str] = {}
        self._begin_wait()

    def run(self, base: int) -> tuple[View, dict[int, socket]]:
        """Forms a group of a later generation.

        Args:
            base: the last generation that included this process.

        Returns:
            The new view, and the connections for its session.

        Raises:
            GroupLostError: this worker cannot continue.
        """
        node = self._node
        attempts = 0
        while True:
            acceptor = node.acceptor
            if acceptor.excluded is not None:
                raise given_up(node.member, acceptor.excluded)
            view = acceptor.view
            assert view is not None
            if view.generation > base:
                entering = ViewEntry(node, self._calls, view, self._terms, self._announce)
                sockets = entering.run()
                if sockets is not None:
                    return view, sockets
                base, attempts, self._planned = view.generation, 0, False
                self._absent = entering.absent
                # The others may still wait to enter, and form the next group only when asked. So
                # this member leads, although members with lower ranks may be alive.
                self._lost = set(view.incarnations[: view.rank(node.me)]) if self._absent else set()
                self._begin_wait()
            else:
                try:
                    self._decide(view, attempts)
                except OSError as error:
                    raise GroupLostError(
                        f"{node.member} cannot continue: its agreements can be neither recorded "
                        f"nor deleted: {error}. Make the folder writable, and start it again."
                    ) from error
                attempts += 1

    def _begin_wait(self) -> None:
        """Starts the time limit for enough workers to arrive, or starts it again."""
        self._deadline = time.monotonic() + self._terms.timeout

    def _decide(self, view: View, attempts: int) -> None:
        """Makes an attempt to have the next view decided, or waits for another member's attempt."""
        node = self._node
        lead = leader(view, self._lost)
        with node.changed:
            if node.view == view:
                node.leader = lead
        if lead is None or lead.incarnation == node.me:
            campaign = proposer.ProposalRound(
                node,
                self._calls,
                view,
                self._terms,
                self._extra,
                self._absent,
                self._deadline,
                self._announce,
            )
            overruled = campaign.run()
            if overruled is None:
                return
            rank = view.rank(node.me)
            other = view.members[overruled.rank] if overruled.rank < len(view.members) else None
            if other is not None:
                self._absent.pop(other.incarnation, None)  # it has arrived
            if other is not None and rank is not None and overruled.rank < rank:
                self._lost.discard(other.incarnation)  # it leads after all
            elif other is not None and overruled.rank != rank:
                self._yield(view, attempts)
        else:
            self._follow(view, lead)

    @property
    def _extra(self) -> Header:
        return {"planned": self._planned, "reason": self._reason}

    def _yield(self, view: View, attempts: int) -> None:
        """Gives a member with a higher rank time to finish its attempt."""
        node = self._node
        end = time.monotonic() + _YIELD_SECONDS * (1 + min(attempts, 10))
        with node.changed:
            while time.monotonic() < end and not self._has_moved_on(view):
                node.changed.wait(proposer.POLL_SECONDS)

    def _follow(self, view: View, lead: Member) -> None:
        node = self._node
        header = {"kind": "await", "view": encode_view(view), **self._extra}
        patience = self._terms.patience_with(lead)
        last = time.monotonic() + self._terms.busy
        busy, here = True, False  # until its frames say otherwise
        waits = WaitMessages(node.member.worker, self._terms.busy, self._announce)

        def watch(frame: Header) -> bool:
            nonlocal busy, here
            here = frame.get("here") is True
            if busy := frame.get("busy") is True:
                self._begin_wait()
            return bool(frame["kind"] == "decided")

        contact = MemberProbe(
            node,
            self._calls,
            lead,
            header,
            watch,
            patience,
            lambda other: [],
        )
        try:
            with node.changed:
                while contact.answer is None and not self._has_moved_on(view):
                    now = time.monotonic()
                    if contact.evidence.state(now, patience) is not State.AWAITED:
                        self._lost.add(lead.incarnation)
                        if busy:
                            self._begin_wait()
                        return
                    # A leader that has arrived may itself wait `busy` seconds for absent members.
                    waits_long = busy or (here and bool(self._absent))
                    if now >= (last if waits_long else self._deadline):
                        seconds = self._terms.busy if waits_long else self._terms.timeout
                        limit = "COLLECTIVE" if waits_long else "START"
                        if here:
                            raise GroupLostError(
                                f"{node.member} cannot continue: {lead} has not formed a new group "
                                f"within {seconds:g} s. See its log, or increase "
                                f"TFDIST_{limit}_TIMEOUT."
                            )
                        self._absent[lead.incarnation] = proposer.not_arrived(seconds, limit)
                        self._lost.add(lead.incarnation)
                        self._begin_wait()
                        return
                    self._terms.check()
                    waits.report(lambda: f"{lead} to form a new group")
                    node.changed.wait(proposer.POLL_SECONDS)
                answer = contact.answer
            if answer is not None:
                node.learn(decode_view(answer.get("view")))
        finally:
            contact.stop()

    def _has_moved_on(self, view: View) -> bool:
        acceptor = self._node.acceptor
        return acceptor.view != view or acceptor.excluded is not None


def given_up(member: Member, view: View) -> GroupLostError:
    """Returns the error of a worker that the new group has left out."""
    return GroupLostError(
        f"{member} was given up: generation {view.generation} of the group was formed without it, "
        f"by {len(view.members)} workers with {view.members[0]} as rank 0. Start it again to join "
        f"them."
    )
