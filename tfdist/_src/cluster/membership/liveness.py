"""Decides whether a member is dead for certain, here or on another host.

A worker cannot distinguish the death of a process on another host from a network failure. The
launcher of that host can, and it outlives its workers.
"""

import contextlib
import selectors
import socket
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial

from tfdist._src.cluster.auth.identity import REGROUP, Identity
from tfdist._src.cluster.cluster_spec import Topology, Worker
from tfdist._src.cluster.membership import record, view
from tfdist._src.cluster.membership.calls import Calls
from tfdist._src.cluster.membership.consensus import AcceptorState
from tfdist._src.cluster.membership.record import here, is_dead, is_visible, read
from tfdist._src.cluster.membership.wire import FRAME_LIMIT, decode_acceptor, encode_acceptor
from tfdist._src.cluster.net.framing import Decoder, Header, WireError, encode
from tfdist._src.cluster.net.listener import claim
from tfdist._src.cluster.net.tls import Tls
from tfdist._src.cluster.net.wait_messages import Announce
from tfdist._src.cluster.rendezvous.acceptor import Acceptor
from tfdist._src.log import logger
from tfdist._src.options import Options
from tfdist.errors import TfdistError

_SECONDS = 2.0


@dataclass(frozen=True)
class LivenessResult:
    """The result of an inquiry about a member.

    Attributes:
        dead: whether the member is dead for certain; False if it is alive, or if this is unknown.
        last_word: the member's last promise and vote, if it is dead and they are known.
        alive: whether a process that would notice the member's death has seen it alive.
    """

    dead: bool = False
    last_word: AcceptorState | None = None
    alive: bool = False


def look(place: view.ProcessIdentity, mine: view.ProcessIdentity) -> LivenessResult:
    """Looks at a process; this works only on the machine where it runs, or ran.

    Args:
        place: where the process runs, or ran.
        mine: where this process runs.
    """
    if not is_visible(place, mine):
        return LivenessResult()
    if not is_dead(place):
        return LivenessResult(alive=True)
    return LivenessResult(True, read(place.record))  # no longer changes after the death


def inspect(
    calls: Calls, member: view.Member, mine: view.ProcessIdentity, witnesses: Iterable[str] = ()
) -> LivenessResult:
    """Looks at a member, and asks processes on its machine.

    Args:
        calls: how to call.
        member: the member.
        mine: where this process runs.
        witnesses: the addresses of processes to ask, unless the member's launcher has already
            reported its death.
    """
    place = member.place
    finding = look(place, mine)
    own = [place.witness] if place.witness and not is_visible(place, mine) else []
    for address in (*own, *witnesses):
        if finding.dead:
            break
        found = ask(calls, address, member)
        finding = replace(found, alive=not found.dead and (found.alive or finding.alive))
    return finding


def ask(calls: Calls, address: str, member: view.Member) -> LivenessResult:
    """Asks a process on a member's machine; without an answer, nothing is known.

    Args:
        calls: how to call.
        address: the address of that process.
        member: the member.
    """
    header = {"kind": "inspect", "member": view.encode_member(member)}
    try:
        answer = calls.ask(address, header, _SECONDS)
        word = answer.get("acceptor")
        if answer["kind"] == "inspected" and answer.get("dead") is True:
            return LivenessResult(True, decode_acceptor(word) if word is not None else None)
        return LivenessResult(alive=answer.get("alive") is True)
    except (OSError, WireError, TfdistError):
        pass
    return LivenessResult()


def reply(finding: LivenessResult) -> Header:
    """Returns the answer to `ask`."""
    word = finding.last_word
    return {
        "kind": "inspected",
        "dead": finding.dead,
        "alive": finding.alive,
        "acceptor": encode_acceptor(word) if word else None,
    }


_EXPECTED = 256
_STRANGERS = 16
_REQUEST_SECONDS = 20.0
_SEND_SECONDS = 1.0


class LivenessServer:
    """Reports to peers whether a process of this machine is dead; needs no separate thread.

    Args:
        address: the `"host:port"` at which it listens.
        options: `secret` and the TLS options authenticate both ends; `host` must be the same as
            for the workers of this host.
        announce: called with lines about rejected connections; writes to stderr by default.

    Raises:
        ClusterError: this process cannot listen at the address.
        TlsError: the certificates are unusable.

    Attributes:
        address: the address at which it listens.

    Example:
        >>> witness = LivenessServer("127.0.0.1:50124", Options(secret="s"))
        >>> witness.serve()
        >>> witness.close()
    """

    def __init__(self, address: str, options: Options, announce: Announce = logger.warning) -> None:
        topology = Topology((Worker("launcher", 0, address),))
        tls = Tls.load(options)
        self.address = address
        self._place = here(options)
        self._buried: set[str] = set()
        self._callers: dict[socket.socket, tuple[Decoder, float]] = {}
        self._listeners = claim(address)
        self._selector = selectors.EpollSelector()
        self._acceptor = Acceptor(
            self._selector,
            Identity.of(topology, REGROUP),
            options.secret,
            tls,
            _EXPECTED,
            _screen,
            self._admit,
            announce,
            _STRANGERS,
            hang_ups=False,
        )
        for sock in self._listeners:
            sock.listen()
            sock.setblocking(False)
            accept = partial(self._acceptor.accept, sock)
            self._selector.register(sock, selectors.EVENT_READ, accept)

    def fileno(self) -> int:
        """The descriptor to wait on before `serve`."""
        return self._selector.fileno()

    @property
    def is_busy(self) -> bool:
        """Whether `serve` must be called soon, even without an event."""
        return bool(self._callers) or self._acceptor.is_busy

    def serve(self) -> None:
        """Handles pending events, without waiting."""
        for key, _ in self._selector.select(0):
            key.data()
        self._acceptor.tick()
        now = time.monotonic()
        for sock in [sock for sock, (_, deadline) in self._callers.items() if now >= deadline]:
            self._end(sock)

    def close(self) -> None:
        """Stops listening, and removes the records of the dead processes that it has reported."""
        for sock in list(self._callers):
            self._end(sock)
        self._acceptor.close()
        for sock in self._listeners:
            sock.close()
        self._selector.close()
        for path in self._buried:
            record.remove(path)

    def _admit(self, sock: socket.socket, hello: Identity) -> None:
        self._callers[sock] = Decoder(FRAME_LIMIT), time.monotonic() + _REQUEST_SECONDS
        self._selector.register(sock, selectors.EVENT_READ, partial(self._read, sock))

    def _read(self, sock: socket.socket) -> None:
        """Reads and answers a request."""
        try:
            data = sock.recv(64 * 1024)
            frames = list(self._callers[sock][0].feed(data))
            if data and not frames:
                return  # the request is incomplete
            if frames:
                sock.settimeout(_SEND_SECONDS)  # the frame (nearly) fits into the kernel's buffer
                sock.sendall(encode(self._answer(frames[0][0])))
        except BlockingIOError:
            return
        except Exception:
            pass  # the peer is gone, or sent an invalid request; the launcher continues
        self._end(sock)

    def _answer(self, header: Header) -> Header:
        if header["kind"] != "inspect":
            raise WireError("it sent a launcher a request that only a worker can answer")
        place = view.decode_member(header.get("member")).place
        finding = look(place, self._place)
        if finding.dead:
            self._buried.add(place.record)
        return reply(finding)

    def _end(self, sock: socket.socket) -> None:
        del self._callers[sock]
        self._selector.unregister(sock)
        with contextlib.suppress(OSError):
            socket.socket.shutdown(sock, socket.SHUT_WR)
        sock.close()


def _screen(hello: Identity) -> None:
    if hello.purpose != REGROUP:
        raise WireError(f"{hello} connected for {hello.purpose!r} to a launcher")
