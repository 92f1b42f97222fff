"""The members of a decided view meet: the others connect to rank 0, unless somebody is lost."""

from __future__ import annotations

import time
from collections.abc import Callable
from socket import socket

from tfdist._src.cluster.membership.calls import Calls
from tfdist._src.cluster.membership.campaign import POLL_SECONDS, Terms, not_arrived
from tfdist._src.cluster.membership.composition import State
from tfdist._src.cluster.membership.consensus import NONE
from tfdist._src.cluster.membership.contact import Contact
from tfdist._src.cluster.membership.node import Node
from tfdist._src.cluster.membership.view import (
    Member,
    View,
    decode_view,
    encode_member,
    encode_view,
)
from tfdist._src.cluster.net.descriptors import allow_descriptors
from tfdist._src.cluster.net.framing import Header
from tfdist._src.cluster.net.wait_messages import Announce, WaitMessages, named
from tfdist.errors import GroupLostError

_LOST = (State.DEAD, State.GONE, State.LOST)
_AGAIN_SECONDS = 0.5
_LET_IN_SECONDS = 20.0
_STAGGER_SECONDS = 0.1
_MOST_STAGGER_SECONDS = 10.0


class Entering:
    """One attempt to enter a view.

    Whoever has ended its attempt never enters this view afterwards. So the members that have
    arrived may leave out one that has not, although it is alive: training in this view needs all of
    its members, and the next generation, which a quorum of them decides, is the only one that can
    follow.

    Args:
        node: this process.
        calls: how to call the others.
        view: the view.
        terms: `patience`, `busy`, `timeout` and `check` are used.
        announce: called with lines about whom this worker waits for.

    Attributes:
        absent: the members that have not arrived in time, by incarnation, and what to say of them.
    """

    def __init__(
        self,
        node: Node,
        calls: Calls,
        view: View,
        terms: Terms,
        announce: Announce,
    ) -> None:
        self._node = node
        self._calls = calls
        self._view = view
        self._terms = terms
        # The first whose time is up asks the others, so that seldom two do at once.
        stagger = min(_STAGGER_SECONDS * (view.rank(node.me) or 0), _MOST_STAGGER_SECONDS)
        self._deadline = time.monotonic() + terms.busy + stagger
        self.absent: dict[str, str] = {}
        self._waits = WaitMessages(node.member.worker, terms.busy, announce)
        self._contacts: list[Contact] = []

    def run(self) -> dict[int, socket] | None:
        """Waits until all members have entered.

        Returns:
            The connections for the session; None if a member is lost meanwhile, has not arrived in
            time, or already forms the next group.

        Raises:
            GroupLostError: rank 0 waits for others, and does not end that in time.
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
            # They learn of the view, and this one learns of their deaths.
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
        """One that has gone on without this process does not enter, but says so."""
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
                # Until then it waits for the others, and begins to form the next group.
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
    ) -> Contact:
        return Contact(
            self._node,
            self._calls,
            member,
            header,
            is_last,
            self._terms.patience_with(member),
            lambda other: [],
            again,
        )

    def _is_lost(self, contact: Contact) -> bool:
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
        return not_arrived(self._terms.busy, "COLLECTIVE")

    def _error(self, first: Member) -> GroupLostError:
        return GroupLostError(
            f"{self._node.member} cannot go on: {first} waits for others to form generation "
            f"{self._view.generation}, and has not ended that within {self._terms.busy:g} s. See "
            f"its log, or increase TFDIST_COLLECTIVE_TIMEOUT."
        )

    def _wait(self, whom: Callable[[], str]) -> None:
        self._terms.check()
        self._waits.report(whom)
        self._node.changed.wait(POLL_SECONDS)


def _is_answer(frame: Header) -> bool:
    return frame["kind"] in ("member", "decided")
