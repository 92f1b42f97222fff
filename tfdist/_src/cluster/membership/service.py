"""Answers the other members, and the processes that want to join, in the thread that listens."""

from __future__ import annotations

import contextlib
import selectors
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial

from tfdist._src.cluster.auth.identity import REGROUP, Identity
from tfdist._src.cluster.membership.inspection import Finding, look, reply
from tfdist._src.cluster.membership.node import Node
from tfdist._src.cluster.membership.view import (
    Member,
    View,
    decode_member,
    decode_view,
    encode_member,
    encode_view,
)
from tfdist._src.cluster.membership.wire import (
    FRAME_LIMIT,
    decode_acceptor,
    decode_request,
    encode_reply,
)
from tfdist._src.cluster.net.framing import Decoder, Header, WireError, encode
from tfdist._src.cluster.net.sockets import send_at_once
from tfdist._src.cluster.spec.topology import Topology

EXPECTED = 256
"""How many members and newcomers may connect at the same time."""

BEAT_SECONDS = 0.5
"""How often one that waits for an answer is told to wait on."""

_REQUEST_SECONDS = 20.0
_SEND_SECONDS = 1.0


class _Caller:
    """A connection, and what is held back for it."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.decoder = Decoder(FRAME_LIMIT)
        self.deadline: float | None = time.monotonic() + _REQUEST_SECONDS
        self.beat = 0.0
        self.after: View | None = None  # waits for a view after this one
        self.entrant: Member | None = None
        self.joiner: Member | None = None
        self.request = ""  # of the joiner


class MembershipService:
    """Serves the connections of one period of listening.

    Each begins with one request. Most are answered at once; whoever waits for a decision, for the
    others to enter a view, or for being admitted, stays connected.

    Args:
        selector: where the connections are registered, with a function to call as data.
        node: this process as a member.
        topology: this process's cluster.
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
        """Whether somebody is connected."""
        return bool(self._callers)

    def admit(self, sock: socket.socket, hello: Identity) -> None:
        """Reads the request of a connection."""
        if hello.version != self.identity.version:
            sock.close()
            return
        caller = self._callers[sock] = _Caller(sock)
        self._selector.register(sock, selectors.EVENT_READ, partial(self._read, caller))

    def tick(self) -> None:
        """Answers whoever waits for something that has happened."""
        now = time.monotonic()
        for caller in list(self._callers.values()):
            with self._drop_on_error(caller):
                self._advance(caller, now)
        self._let_in()

    def close(self) -> None:
        """Closes the connections; those that still wait come again."""
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
        """Ends a connection that is gone, or whose request is nonsense; and at other errors."""
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
            raise WireError("it asks for something unknown")
        caller.deadline = None
        reply = serve(caller, header)
        if reply is not None:
            self._reply(caller, reply)
        else:
            self._advance(caller, time.monotonic())

    def _propose(self, caller: _Caller, header: Header) -> Header:
        request = decode_request(header)
        reply = self._node.answer(request)
        self._disturb(request.view, header)
        return encode_reply(reply) if reply else self._who()

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
            raise WireError("it enters a view that is not its own")
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
            finding = Finding(True, word)
        return reply(finding)

    def _farewell(self, caller: _Caller, header: Header) -> Header:
        member = decode_member(header.get("member"))
        heard = header.get("heard", {})
        if not isinstance(heard, Mapping):
            raise WireError("it sent no last words")
        words = {**heard, member.incarnation: header.get("acceptor")}
        for incarnation, word in words.items():
            self._node.say_last_word(incarnation, decode_acceptor(word))
        return self._who()

    def _disturb(self, view: View, header: Header) -> None:
        """A member of this view needs a new group; here, a step may be running."""
        node = self._node
        if node.view == view and not node.regrouping and not header.get("planned"):
            reason = header.get("reason")
            text = reason if isinstance(reason, str) and reason.isprintable() else ""
            node.on_disturbed(text or "another worker forms a new group")

    def _redirection(self, joiner: Member) -> Header | None:
        """Where one who wants to join has to go; None if it is here."""
        view = self._node.view
        if view is None or self._node.acceptor.excluded:
            return {"kind": "none"}
        first = self._node.leader or view.members[0]
        # At the address of a dead rank 0, it would find itself.
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
        """Lets all in that have entered the view, once the main thread says so."""
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
        caller.sock.settimeout(_SEND_SECONDS)  # it fits into the buffer of the kernel, or nearly
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
