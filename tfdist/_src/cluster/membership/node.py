"""The state of this process as a member, and its answers to members and joining processes."""

import contextlib
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial

from tfdist._src.cluster.auth.identity import REGROUP, Identity
from tfdist._src.cluster.cluster_spec import Topology
from tfdist._src.cluster.membership import wire
from tfdist._src.cluster.membership.consensus import NONE, AcceptorState, Ballot, Reply, Request
from tfdist._src.cluster.membership.liveness import LivenessResult, look, reply
from tfdist._src.cluster.membership.record import Record, here, sweep
from tfdist._src.cluster.membership.view import (
    Member,
    View,
    decode_member,
    decode_view,
    encode_member,
    encode_view,
)
from tfdist._src.cluster.net.framing import Decoder, Header, WireError, encode
from tfdist._src.cluster.net.sockets import send_at_once
from tfdist._src.options import Options


class Node:
    """The state of this process, which belongs to a view or waits to be admitted.

    Args:
        topology: the cluster of this process. Its own entry describes the member.
        options: the job's options. `host` and `launcher.witness` are used.

    Attributes:
        member: the identity of this process as a member.
        changed: a condition variable that guards this object and is notified of each change.
        regrouping: whether the main thread is forming a new group.
        failed: whether the last attempt to form a new group failed.
        leader: the member that leads while a new group forms. Waiting processes are redirected to
            this member.
        on_disturbed: called with the reason when another member forms a new group.
        judge: called with the request of a joining process. It returns None if the process may be
            admitted, "" if the process has to wait, and otherwise the reason for a refusal.
        tell: called when another member requests the report of this process; returns the report.
        wake: wakes the listening thread.
        entrants: the view that this process leads as rank 0, and the incarnations of the members
            that have asked to enter this view.
        go: the view in `entrants`, once all of its members have asked to enter it. The listening
            thread then hands over their connections.
        sockets: the connections that the listening thread has handed over, by incarnation.
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
        self.sockets: dict[str, socket.socket] = {}

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
        """The last view that includes this process."""
        return self._acceptor.view

    @property
    def seen(self) -> Ballot:
        """The highest ballot known to this process."""
        return self._seen

    def answer(self, request: Request) -> Reply | None:
        """Answers a proposer, and writes a new promise or vote to the record before it returns.

        See `AcceptorState.answer`.

        Raises:
            OSError: the record can be neither written nor removed, or `finish` has been called.
        """
        with self.changed:
            if self._final:
                raise ConnectionError("this member leaves")
            acceptor, reply = self._acceptor.answer(request, self.me)
            self._seen = max(self._seen, request.ballot)
            self._replace(acceptor)
            return reply

    def learn(self, view: View) -> None:
        """Updates the state after this process has learned of a decided view."""
        with self.changed:
            if not self._final:
                self._replace(self._acceptor.learn(view, self.me))

    def heard_of(self, ballot: Ballot) -> None:
        """Updates `seen` with a ballot that another member knows."""
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

    # Members that leave.

    def say_last_word(self, incarnation: str, last_word: AcceptorState) -> None:
        """Stores the last word of a member that has left the group."""
        with self.changed:
            self._last_words[incarnation] = last_word
            self.changed.notify_all()

    @property
    def last_words(self) -> dict[str, AcceptorState]:
        """The last words that this process has received from leaving members, by incarnation."""
        with self.changed:
            return dict(self._last_words)

    def last_word(self, incarnation: str) -> AcceptorState | None:
        """Returns the last word that a leaving member has sent to this process, if any."""
        return self._last_words.get(incarnation)

    @property
    def others(self) -> list[Member]:
        """The other members of the view, without members that have already sent a last word."""
        members = self.view.members if self.view else ()
        here = (self.me, *self._last_words)
        return [member for member in members if member.incarnation not in here]

    def finish(self) -> AcceptorState:
        """Returns the last word of this process; from now on, the process answers no proposer."""
        with self.changed:
            self._final = True
            return self._acceptor

    def close(self, *, keep_record: bool) -> None:
        """Ends the membership; removes the record unless other members may still need it."""
        if not keep_record:
            self._record.remove()

    # Processes that wait to be admitted.

    @property
    def connected(self) -> list[Member]:
        """The joining processes that are connected and may be admitted, in order of arrival."""
        with self.changed:
            waiting = self._waiting.values()
            return [member for member, request in waiting if self.judge(request) is None]

    def arrive(self, member: Member, request: str) -> None:
        """Records a joining process that waits to be admitted, and its request."""
        with self.changed:
            self._waiting[member.incarnation] = (member, request)
            self.changed.notify_all()

    def depart(self, member: Member) -> None:
        """Forgets a joining process after its connection has ended; it may connect again."""
        with self.changed:
            if self._waiting.pop(member.incarnation, None) is not None:
                self.changed.notify_all()


EXPECTED = 256
"""The maximum number of members and newcomers that connect at the same time."""

BEAT_SECONDS = 0.5
"""The interval at which a waiting peer receives a "wait" frame."""

_REQUEST_SECONDS = 20.0
_SEND_SECONDS = 1.0


class _Caller:
    """A connection to a peer that has sent a request or is about to send one."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.decoder = Decoder(wire.FRAME_LIMIT)
        self.deadline: float | None = time.monotonic() + _REQUEST_SECONDS
        self.beat = 0.0
        self.after: View | None = None  # the peer waits for a view with a later generation
        self.entrant: Member | None = None
        self.joiner: Member | None = None
        self.request = ""  # of the joiner


class MembershipService:
    """Answers the requests of other members and of joining processes.

    The listener creates a new service each time that it starts to listen. Each connection carries
    one request, and most requests are answered immediately. A peer stays connected while it waits
    for the next view, for other members to enter a view, or for its own admission.

    Args:
        selector: the selector of the listening thread. The data of each registered connection is
            the function to call when the connection is ready.
        node: the state of this process as a member.
        topology: the cluster of this process.
    """

    def __init__(self, selector: selectors.BaseSelector, node: Node, topology: Topology) -> None:
        self.identity = Identity.of(topology, REGROUP)
        self._selector = selector
        self._node = node
        self._callers: dict[socket.socket, _Caller] = {}
        self._kinds: dict[str, Callable[[_Caller, Header], Header | None]] = {
            "prepare": self._propose,
            "accept": self._propose,
            "decided": self._decided,
            "await": self._await,
            "enter": self._enter,
            "join": self._join,
            "who": lambda caller, header: self._who(),
            "inspect": self._inspect,
            "inquire": lambda caller, header: {"kind": "told", "text": self._node.tell()},
            "farewell": self._farewell,
        }

    @property
    def is_busy(self) -> bool:
        """Whether any peer is connected."""
        return bool(self._callers)

    def admit(self, sock: socket.socket, hello: Identity) -> None:
        """Starts to read the request of a new connection."""
        if hello.version != self.identity.version:
            sock.close()
            return
        caller = self._callers[sock] = _Caller(sock)
        self._selector.register(sock, selectors.EVENT_READ, partial(self._read, caller))

    def tick(self) -> None:
        """Answers the waiting peers that can be answered now."""
        now = time.monotonic()
        for caller in list(self._callers.values()):
            with self._drop_on_error(caller):
                self._advance(caller, now)
        self._let_in()

    def close(self) -> None:
        """Closes all connections; the peers that are still waiting will connect again."""
        for caller in list(self._callers.values()):
            self._end(caller)

    def _read(self, caller: _Caller) -> None:
        with self._drop_on_error(caller), contextlib.suppress(BlockingIOError):
            data = caller.sock.recv(64 * 1024)
            frames = caller.decoder.feed(data)
            if not data:
                raise ConnectionError("connection closed")
            for header, _ in frames:
                self._handle(caller, header)

    @contextlib.contextmanager
    def _drop_on_error(self, caller: _Caller) -> Iterator[None]:
        """Closes the connection on any error; unexpected errors are raised again."""
        try:
            yield
        except (OSError, WireError, TypeError, ValueError, LookupError):
            self._end(caller)
        except BaseException:
            self._end(caller)
            raise

    def _handle(self, caller: _Caller, header: Header) -> None:
        to = header.get("to")
        if to is not None and to != self._node.me:
            self._reply(caller, {"kind": "other", "member": encode_member(self._node.member)})
            return
        serve = self._kinds.get(header["kind"])
        if serve is None:
            raise WireError("it sent an unknown request")
        caller.deadline = None
        reply = serve(caller, header)
        if reply is not None:
            self._reply(caller, reply)
        else:
            self._advance(caller, time.monotonic())

    def _propose(self, caller: _Caller, header: Header) -> Header:
        request = wire.decode_request(header)
        reply = self._node.answer(request)
        self._disturb(request.view, header)
        return wire.encode_reply(reply) if reply else self._who()

    def _decided(self, caller: _Caller, header: Header) -> Header:
        self._node.learn(decode_view(header.get("view")))
        return self._who()

    def _await(self, caller: _Caller, header: Header) -> None:
        caller.after = decode_view(header.get("view"))
        self._node.learn(caller.after)
        self._disturb(caller.after, header)

    def _enter(self, caller: _Caller, header: Header) -> None:
        view = caller.after = decode_view(header.get("view"))
        self._node.learn(view)
        member = decode_member(header.get("member"))
        if view.rank(member.incarnation) is None or view.rank(self._node.me) != 0:
            raise WireError(
                "it sent a view that does not contain it, or in which this worker is not rank 0"
            )
        caller.entrant = member
        self._note_entrants()

    def _join(self, caller: _Caller, header: Header) -> Header | None:
        member = decode_member(header.get("member"))
        if redirection := self._redirection(member):
            return redirection
        request = header.get("request", "")
        if verdict := self._verdict(request):
            return verdict
        caller.joiner, caller.request = member, request
        self._node.arrive(member, request)
        view = self._node.view
        for other in view.members if view else ():
            same = other.worker.address == member.worker.address
            if same and other.incarnation != member.incarnation and not self._node.regrouping:
                self._node.on_disturbed(f"{other} has been replaced by a process at its address")
        return None

    def _verdict(self, request: str) -> Header | None:
        reason = self._node.judge(request)
        return {"kind": "declined", "reason": reason} if reason else None

    def _who(self) -> Header:
        acceptor = self._node.acceptor
        return {
            "kind": "member",
            "member": encode_member(self._node.member),
            "view": encode_view(acceptor.view),
        }

    def _inspect(self, caller: _Caller, header: Header) -> Header:
        member = decode_member(header.get("member"))
        finding = look(member.place, self._node.member.place)
        if not finding.dead and (word := self._node.last_word(member.incarnation)):
            finding = LivenessResult(True, word)
        return reply(finding)

    def _farewell(self, caller: _Caller, header: Header) -> Header:
        member = decode_member(header.get("member"))
        heard = header.get("heard", {})
        if not isinstance(heard, Mapping):
            raise WireError("it sent a malformed farewell")
        words = {**heard, member.incarnation: header.get("acceptor")}
        for incarnation, word in words.items():
            self._node.say_last_word(incarnation, wire.decode_acceptor(word))
        return self._who()

    def _disturb(self, view: View, header: Header) -> None:
        """Interrupts a running step, because another member of the same view forms a new group.

        This has no effect if this process also forms a new group, or if the other member regroups
        as planned at the end of a step.
        """
        node = self._node
        if node.view == view and not node.regrouping and not header.get("planned"):
            reason = header.get("reason")
            text = reason if isinstance(reason, str) and reason.isprintable() else ""
            node.on_disturbed(text or "another worker forms a new group")

    def _redirection(self, joiner: Member) -> Header | None:
        """Returns a frame that redirects a joining process; None if this member serves it."""
        view = self._node.view
        if view is None or self._node.acceptor.excluded:
            return {"kind": "none"}
        first = self._node.leader or view.members[0]
        # A process that replaces a dead rank 0 has the address of rank 0. If it were redirected to
        # that address, it would connect to itself.
        if first.incarnation == self._node.me or first.worker.address == joiner.worker.address:
            return None
        return {"kind": "redirect", "member": encode_member(first)}

    def _advance(self, caller: _Caller, now: float) -> None:
        if caller.sock not in self._callers:
            return
        acceptor = self._node.acceptor
        if caller.after is not None:
            later = acceptor.excluded or acceptor.view
            if later and later.generation > caller.after.generation:
                self._reply(caller, {"kind": "decided", "view": encode_view(later)})
                return
        if caller.joiner is not None:
            view = acceptor.view
            if view and view.rank(caller.joiner.incarnation) is not None:
                self._reply(caller, {"kind": "decided", "view": encode_view(view)})
                return
            if redirection := self._redirection(caller.joiner):
                self._reply(caller, redirection)
                return
            if verdict := self._verdict(caller.request):
                self._reply(caller, verdict)
                return
        if caller.deadline is not None and now >= caller.deadline:
            self._end(caller)
        elif caller.deadline is None and now >= caller.beat:
            caller.beat = now + BEAT_SECONDS
            here = self._node.regrouping
            wait = {"kind": "wait", "here": here, "busy": not (here or self._node.failed)}
            if not send_at_once(caller.sock, encode(wait)):
                self._end(caller)

    def _let_in(self) -> None:
        """Lets all waiting members enter the view `Node.go`, once the main thread has set it."""
        node = self._node
        with node.changed:
            view, node.go = node.go, None
            if view is None or view != node.view:
                return
            entrants = [c for c in self._callers.values() if c.entrant and c.after == view]
            for caller in entrants:
                assert caller.entrant is not None
                send_at_once(caller.sock, encode({"kind": "go"}))
                self._selector.unregister(caller.sock)
                del self._callers[caller.sock]
                node.sockets[caller.entrant.incarnation] = caller.sock
            node.entrants = (None, frozenset())
            node.changed.notify_all()

    def _note_entrants(self) -> None:
        node = self._node
        with node.changed:
            callers = self._callers.values()
            here = [c.entrant for c in callers if c.entrant and c.after == node.view]
            node.entrants = (node.view, frozenset(one.incarnation for one in here))
            node.changed.notify_all()

    def _reply(self, caller: _Caller, header: Header) -> None:
        frame = encode(header)
        # The frame is small, so the kernel's buffer can usually hold all of it.
        caller.sock.settimeout(_SEND_SECONDS)
        with contextlib.suppress(OSError):
            caller.sock.sendall(frame)
        self._end(caller)

    def _end(self, caller: _Caller) -> None:
        if self._callers.pop(caller.sock, None) is None:
            return
        self._selector.unregister(caller.sock)
        with contextlib.suppress(OSError):
            socket.socket.shutdown(caller.sock, socket.SHUT_WR)
        caller.sock.close()
        if caller.entrant:
            self._note_entrants()
        if caller.joiner:
            self._node.depart(caller.joiner)
