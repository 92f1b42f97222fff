"""This process as a member: its state, shared by its main thread and the thread that listens."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable
from socket import socket

from tfdist._src.cluster.membership.consensus import NONE, AcceptorState, Ballot, Reply, Request
from tfdist._src.cluster.membership.place import here
from tfdist._src.cluster.membership.record import Record, sweep
from tfdist._src.cluster.membership.view import Member, View
from tfdist._src.cluster.spec.topology import Topology
from tfdist._src.options import Options


class Node:
    """A process that belongs to a view, or waits to be admitted.

    Args:
        topology: its cluster; its own entry in it becomes that of the member.
        options: `host` is used.

    Attributes:
        member: this process.
        changed: guards everything here, and is notified of changes.
        regrouping: whether the main thread is forming a new group.
        failed: whether it could not form one, and has not tried again.
        leader: the member that leads while a new group forms; those that wait turn to it.
        on_disturbed: called when another member needs a new group, with what to say of it.
        judge: says why a process is not admitted, given its request; "" if it has to wait, and None
            if it may be.
        tell: says what others that inquire are told about this process.
        wake: wakes the thread that listens.
        entrants: the view of which this process is rank 0, and who else has entered it.
        go: that view, once they are to be let in.
        sockets: the connections of those that have been let in.
    """

    def __init__(self, topology: Topology, options: Options) -> None:
        incarnation = secrets.token_hex(8)
        self._record = Record(incarnation)
        self.member = Member(topology.me, incarnation, here(options, self._record.path))
        sweep(self.member.place)
        self.changed = threading.Condition(threading.RLock())
        self.regrouping = self.failed = False
        self.leader: Member | None = None
        self.on_disturbed: Callable[[str], object] = lambda message: None
        self.judge: Callable[[str], str | None] = lambda request: None
        self.tell: Callable[[], str] = lambda: ""
        self.wake: Callable[[], object] = lambda: None
        self._acceptor = AcceptorState()
        self._seen = NONE
        self._final = False
        self._last_words: dict[str, AcceptorState] = {}
        self._waiting: dict[str, tuple[Member, str]] = {}
        self.entrants: tuple[View | None, frozenset[str]] = (None, frozenset())
        self.go: View | None = None
        self.sockets: dict[str, socket] = {}

    @property
    def me(self) -> str:
        """The incarnation of this process."""
        return self.member.incarnation

    @property
    def acceptor(self) -> AcceptorState:
        """The state of this process as an acceptor."""
        return self._acceptor

    @property
    def view(self) -> View | None:
        """The last view to which this process belongs."""
        return self._acceptor.view

    @property
    def seen(self) -> Ballot:
        """The highest ballot that this process has heard of."""
        return self._seen

    def answer(self, request: Request) -> Reply | None:
        """Answers a proposer, as `AcceptorState.answer`; what it promises is recorded before.

        Raises:
            OSError: it cannot be recorded, or this process has said its last word.
        """
        with self.changed:
            if self._final:
                raise ConnectionError("this member leaves")
            acceptor, reply = self._acceptor.answer(request, self.me)
            self._seen = max(self._seen, request.ballot)
            self._replace(acceptor)
            return reply

    def learn(self, view: View) -> None:
        """Learns of a decided view."""
        with self.changed:
            if not self._final:
                self._replace(self._acceptor.learn(view, self.me))

    def heard_of(self, ballot: Ballot) -> None:
        """Notes a ballot that others have heard of."""
        with self.changed:
            self._seen = max(self._seen, ballot)

    def _replace(self, acceptor: AcceptorState) -> None:
        if acceptor == self._acceptor:
            return
        self._record.write(acceptor)
        if acceptor.view != self._acceptor.view and acceptor.view:
            for incarnation in acceptor.view.incarnations:
                self._waiting.pop(incarnation, None)
            self._seen = NONE
            self.go = self.leader = None
        self._acceptor = acceptor
        self.changed.notify_all()
        self.wake()

    # Those that leave.

    def say_last_word(self, incarnation: str, last_word: AcceptorState) -> None:
        """Keeps the last word of a member that has left."""
        with self.changed:
            self._last_words[incarnation] = last_word
            self.changed.notify_all()

    @property
    def last_words(self) -> dict[str, AcceptorState]:
        """The last words of all members that are known here to have left, by incarnation."""
        with self.changed:
            return dict(self._last_words)

    def last_word(self, incarnation: str) -> AcceptorState | None:
        """The last word of a member that has left, if it has told this process."""
        return self._last_words.get(incarnation)

    @property
    def others(self) -> list[Member]:
        """The other members, without those whose last word has been heard here."""
        members = self.view.members if self.view else ()
        here = (self.me, *self._last_words)
        return [member for member in members if member.incarnation not in here]

    def finish(self) -> AcceptorState:
        """The last word of this process: it takes part in nothing more."""
        with self.changed:
            self._final = True
            return self._acceptor

    def close(self, *, keep_record: bool) -> None:
        """Ends the membership; the record is kept where nobody has heard the last word."""
        if not keep_record:
            self._record.remove()

    # Those that wait to be admitted.

    @property
    def connected(self) -> list[Member]:
        """The processes that are connected now and may be admitted, in order of arrival."""
        with self.changed:
            waiting = self._waiting.values()
            return [member for member, request in waiting if self.judge(request) is None]

    def arrive(self, member: Member, request: str) -> None:
        """Notes a process that waits to be admitted, with what it says of itself."""
        with self.changed:
            self._waiting[member.incarnation] = (member, request)
            self.changed.notify_all()

    def depart(self, member: Member) -> None:
        """Notes that the connection of one has ended; it may come again."""
        with self.changed:
            if self._waiting.pop(member.incarnation, None) is not None:
                self.changed.notify_all()
