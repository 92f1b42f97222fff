"""Moves this process to the next group: the members decide on a view, and then enter the view."""

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
"""The maximum total time for the farewells of all members."""


def inquire(node: Node, calls: Calls) -> Iterator[str]:
    """Requests a report from each other member; yields the reports that arrive in time."""
    for other in node.others:
        header = {"kind": "inquire", "to": other.incarnation}
        try:
            answer = calls.ask(other.worker.address, header, _INQUIRY_SECONDS)
        except (OSError, WireError, TfdistError):
            continue
        if answer["kind"] == "told":
            yield str(answer["text"])


def say_farewell(node: Node, calls: Calls, last_word: AcceptorState) -> bool:
    """Sends the last word of this process to another member that still runs.

    This function also sends all last words that this process has received from other members. In
    this way, the last member to leave knows the last words of all others.

    Returns:
        Whether another member has received the last word, or no other member is left. The record of
        this process is then no longer needed.
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
        except (OSError, WireError, TfdistError):  # this member is also leaving, or is busy
            continue
        if answer["kind"] != "other":
            return True
    return not node.others  # empty if all other members have sent their last words meanwhile


_LOST = (State.DEAD, State.GONE, State.LOST)
_AGAIN_SECONDS = 0.5
_LET_IN_SECONDS = 20.0
_STAGGER_SECONDS = 0.1
_MAX_STAGGER_SECONDS = 10.0


class ViewEntry:
    """One attempt of this process to enter a view, which connects the members of the view.

    The group of a view forms only if all its members enter the view. A member never tries again
    after its attempt has failed. If some members stop waiting for a live member that has not
    arrived, the group of this view can therefore never form, and a quorum of the members can decide
    on the next generation.

    Args:
        node: the state of this process as a member.
        calls: sends the requests to the other members.
        view: the view to enter.
        terms: the conditions for forming the group. `patience`, `busy`, `timeout` and `check` are
            used, and the incarnations in `suspects` and `silent` get less time.
        announce: called with messages that name the missing workers.

    Attributes:
        absent: maps the incarnation of each member that has not arrived in time to the reason.
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
        # The first member that times out asks the others to form the next group. The deadlines of
        # the members differ a little, so that two members rarely ask at the same time.
        stagger = min(_STAGGER_SECONDS * (view.rank(node.me) or 0), _MAX_STAGGER_SECONDS)
        self._deadline = time.monotonic() + terms.busy + stagger
        self.absent: dict[str, str] = {}
        self._waits = WaitMessages(node.member.worker, terms.busy, announce)
        self._contacts: list[MemberProbe] = []

    def run(self) -> dict[int, socket] | None:
        """Waits until all members have entered the view.

        Returns:
            The connections for the session, by rank. None if a member is lost, has not arrived in
            time, or already forms the next group.

        Raises:
            GroupLostError: rank 0 has arrived, but has not received the other members in time.
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
            # This request tells the member about the view. By repeating the request, this process
            # also finds out if the member dies.
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
        """Learns of a later view if the answer of a member contains one."""
        for contact in self._contacts:
            if contact.answer and contact.answer.get("view"):
                view = decode_view(contact.answer["view"])
                if view.generation > self._view.generation:
                    self._node.learn(view)

    def _arrive(self) -> dict[int, socket] | None:
        node, first = self._node, self._view.members[0]
        member = encode_member(node.member)
        header = {"kind": "enter", "view": encode_view(self._view), "member": member}
        here = noticed = False  # whether rank 0 has arrived, now or at any time

        def watch(frame: Header) -> bool:
            nonlocal here, noticed
            here = frame.get("here") is True
            if here and not noticed:
                # Rank 0 waits up to `busy` seconds for the others, and then forms the next group.
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
        """Whether another member already forms the next group, or has already formed it."""
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
    """Forms a new group during one call of `Membership.regroup` or `Joiner.wait`.

    A live member may arrive too late to lead or to enter a view. If the other members are a
    majority, the next view does not contain this member. It learns of this view when it arrives.

    Args:
        node: the state of this process, which belongs to a view.
        calls: sends the requests to the other members.
        terms: the conditions for forming the group.
        planned: whether all members regroup together at the end of a step. If False, members that
            still run a step are interrupted.
        reason: the reason for the interruption, which is sent to the other members.
        announce: called with each progress message.
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
        self._lost: set[str] = set()  # the members that cannot lead
        self._absent: dict[str, str] = {}
        self._begin_wait()

    def run(self, base: int) -> tuple[View, dict[int, socket]]:
        """Forms a group with a later generation than `base`.

        Args:
            base: the generation of the last group that contained this process.

        Returns:
            The new view, and the connections for the session of the new group.

        Raises:
            GroupLostError: this worker cannot continue (see `Membership.regroup`).
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
                # The other members may still wait to enter this view. They form the next group only
                # if a member asks them. So this member leads the next group, although members with
                # lower ranks may be alive.
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
        """Starts or restarts the time limit in which enough workers must arrive."""
        self._deadline = time.monotonic() + self._terms.timeout

    def _decide(self, view: View, attempts: int) -> None:
        """Proposes the next view if this process leads; otherwise waits for the leader."""
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
                self._absent.pop(other.incarnation, None)  # its ballot shows that it has arrived
            if other is not None and rank is not None and overruled.rank < rank:
                self._lost.discard(other.incarnation)  # it can lead after all
            elif other is not None and overruled.rank != rank:
                self._yield(view, attempts)
        else:
            self._follow(view, lead)

    @property
    def _extra(self) -> Header:
        return {"planned": self._planned, "reason": self._reason}

    def _yield(self, view: View, attempts: int) -> None:
        """Waits a short time, so that a member with a higher rank can finish its attempt."""
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
        busy, here = True, False  # assumed until the first frame of the leader arrives
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
                    # The leader may itself wait `busy` seconds for absent members.
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
    """Returns the error that a worker raises if the new group was formed without it."""
    return GroupLostError(
        f"{member} was given up: generation {view.generation} of the group was formed without it, "
        f"by {len(view.members)} workers with {view.members[0]} as rank 0. Start it again to join "
        f"them."
    )
