"""The way of a process from one group to the next: decide, enter, and again if somebody is lost."""

from __future__ import annotations

import time
from socket import socket

from tfdist._src.cluster.membership.calls import Calls
from tfdist._src.cluster.membership.campaign import POLL_SECONDS, Campaign, Terms, not_arrived
from tfdist._src.cluster.membership.composition import State, leader
from tfdist._src.cluster.membership.contact import Contact
from tfdist._src.cluster.membership.entering import Entering
from tfdist._src.cluster.membership.node import Node
from tfdist._src.cluster.membership.view import Member, View, decode_view, encode_view
from tfdist._src.cluster.net.framing import Header
from tfdist._src.cluster.net.wait_messages import Announce, WaitMessages
from tfdist.errors import GroupLostError

_YIELD_SECONDS = 0.1


class Regrouping:
    """One call of `Membership.regroup`, or the admission of a newcomer.

    A member that is alive, but has not arrived in time, to lead or to enter a view, is left out of
    the next view if the others are a majority; it learns of that when it arrives.

    Args:
        node: this process, which belongs to a view.
        calls: how to call the others.
        terms: on what.
        planned: whether all members come by themselves, at the end of a step.
        reason: what the others are told if they have to be stopped.
        announce: called with lines about the progress.
    """

    def __init__(
        self,
        node: Node,
        calls: Calls,
        terms: Terms,
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
        self._lost: set[str] = set()  # they do not lead
        self._absent: dict[str, str] = {}
        self._begin_wait()

    def run(self, base: int) -> tuple[View, dict[int, socket]]:
        """Forms a group of a later generation.

        Args:
            base: the last generation that this process was in.

        Returns:
            Its view, and the connections for its session.

        Raises:
            GroupLostError: this worker cannot go on.
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
                entering = Entering(node, self._calls, view, self._terms, self._announce)
                sockets = entering.run()
                if sockets is not None:
                    return view, sockets
                base, attempts, self._planned = view.generation, 0, False
                self._absent = entering.absent
                # The others may still wait to enter, and begin only when they are asked.
                self._lost = set(view.incarnations[: view.rank(node.me)]) if self._absent else set()
                self._begin_wait()
            else:
                try:
                    self._decide(view, attempts)
                except OSError as error:
                    raise GroupLostError(
                        f"{node.member} cannot go on: what it agrees to can be neither recorded "
                        f"nor forgotten: {error}. Make the folder writable, and start it again."
                    ) from error
                attempts += 1

    def _begin_wait(self) -> None:
        """Begins to wait for enough workers: the time for which one was busy does not count."""
        self._deadline = time.monotonic() + self._terms.timeout

    def _decide(self, view: View, attempts: int) -> None:
        """Makes one attempt to have the next view decided, or waits for another member's."""
        node = self._node
        lead = leader(view, self._lost)
        with node.changed:
            if node.view == view:
                node.leader = lead
        if lead is None or lead.incarnation == node.me:
            campaign = Campaign(
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
        """Gives a member of a higher rank, which has made an attempt, the time to end it."""
        node = self._node
        end = time.monotonic() + _YIELD_SECONDS * (1 + min(attempts, 10))
        with node.changed:
            while time.monotonic() < end and not self._has_moved_on(view):
                node.changed.wait(POLL_SECONDS)

    def _follow(self, view: View, lead: Member) -> None:
        node = self._node
        header = {"kind": "await", "view": encode_view(view), **self._extra}
        patience = self._terms.patience_with(lead)
        last = time.monotonic() + self._terms.busy
        busy, here = True, False  # until it says otherwise
        waits = WaitMessages(node.member.worker, self._terms.busy, self._announce)

        def watch(frame: Header) -> bool:
            nonlocal busy, here
            here = frame.get("here") is True
            if busy := frame.get("busy") is True:
                self._begin_wait()
            return bool(frame["kind"] == "decided")

        contact = Contact(
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
                    # One that is here may itself wait as long for those that are absent.
                    waits_long = busy or (here and bool(self._absent))
                    if now >= (last if waits_long else self._deadline):
                        seconds = self._terms.busy if waits_long else self._terms.timeout
                        limit = "COLLECTIVE" if waits_long else "START"
                        if here:
                            raise GroupLostError(
                                f"{node.member} cannot go on: {lead} has not formed a new group "
                                f"within {seconds:g} s. See its log, or increase "
                                f"TFDIST_{limit}_TIMEOUT."
                            )
                        self._absent[lead.incarnation] = not_arrived(seconds, limit)
                        self._lost.add(lead.incarnation)
                        self._begin_wait()
                        return
                    self._terms.check()
                    waits.report(lambda: f"{lead} to form a new group")
                    node.changed.wait(POLL_SECONDS)
                answer = contact.answer
            if answer is not None:
                node.learn(decode_view(answer.get("view")))
        finally:
            contact.stop()

    def _has_moved_on(self, view: View) -> bool:
        acceptor = self._node.acceptor
        return acceptor.view != view or acceptor.excluded is not None


def given_up(member: Member, view: View) -> GroupLostError:
    """The error of a worker without which the others have gone on."""
    return GroupLostError(
        f"{member} was given up: generation {view.generation} of the group was formed without it, "
        f"by {len(view.members)} workers with {view.members[0]} as rank 0. Start it again to join "
        f"them."
    )
