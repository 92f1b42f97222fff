"""Finds out whether another member is dead, on this host or on another one.

A worker cannot distinguish the death of a process on another host from a network failure. The
launcher on that host can distinguish them, and it still runs after its workers have died.
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
    """The answer to the question whether a member is alive.

    Attributes:
        dead: whether the member is known to be dead.
        last_word: the last promises and votes of the member, if the member is dead and they are
            known.
        alive: whether the member is known to be alive. If `dead` and `alive` are both False, the
            state of the member is unknown.
    """

    dead: bool = False
    last_word: AcceptorState | None = None
    alive: bool = False


def look(place: view.ProcessIdentity, mine: view.ProcessIdentity) -> LivenessResult:
    """Checks whether a process on this machine is alive.

    Args:
        place: the identity of the other process.
        mine: the identity of this process.

    Returns:
        The result. If the other process belongs to another machine, its state is unknown.
    """
    if not is_visible(place, mine):
        return LivenessResult()
    if not is_dead(place):
        return LivenessResult(alive=True)
    return LivenessResult(True, read(place.record))  # a dead process no longer changes it


def inspect(
    calls: Calls, member: view.Member, mine: view.ProcessIdentity, witnesses: Iterable[str] = ()
) -> LivenessResult:
    """Checks whether a member is alive, and asks processes on the member's machine if necessary.

    If this process cannot see the member itself, it first asks the member's launcher. It then asks
    the witnesses, until one of them reports that the member is dead.

    Args:
        calls: sends the requests.
        member: the member.
        mine: the identity of this process.
        witnesses: the addresses of other processes on the member's machine.
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
    """Asks a process on a member's machine whether the member is alive.

    Args:
        calls: sends the request.
        address: the address of the process to ask.
        member: the member in question.

    Returns:
        The result. If the process does not answer, the state of the member is unknown.
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
    """Returns the header of the frame that answers the request of `ask`."""
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
    """Tells workers of other hosts whether a process on this machine is dead.

    The launcher runs this server in its main loop, without a separate thread.

    Args:
        address: the `"host:port"` at which the server listens.
        options: the job's options. `secret` and the TLS options authenticate both ends. `host` must
            be the same as for the workers on this host.
        announce: called with each message about a rejected connection; prints to stderr by default.

    Raises:
        ClusterError: this process cannot listen at the address.
        TlsError: the certificates are unusable.

    Attributes:
        address: the `"host:port"` at which the server listens.

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
        """Returns a file descriptor that is readable when `serve` must be called."""
        return self._selector.fileno()

    @property
    def is_busy(self) -> bool:
        """Whether `serve` must be called soon, even if the descriptor is not readable."""
        return bool(self._callers) or self._acceptor.is_busy

    def serve(self) -> None:
        """Handles all pending events; returns immediately if there are none."""
        for key, _ in self._selector.select(0):
            key.data()
        self._acceptor.tick()
        now = time.monotonic()
        for sock in [sock for sock, (_, deadline) in self._callers.items() if now >= deadline]:
            self._end(sock)

    def close(self) -> None:
        """Stops listening, and removes the records of the processes that were reported dead."""
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
        """Reads a request and answers it once it is complete."""
        try:
            data = sock.recv(64 * 1024)
            frames = list(self._callers[sock][0].feed(data))
            if data and not frames:
                return  # the request is incomplete
            if frames:
                # The frame is small, so the kernel's buffer can usually hold all of it.
                sock.settimeout(_SEND_SECONDS)
                sock.sendall(encode(self._answer(frames[0][0])))
        except BlockingIOError:
            return
        except Exception:
            # The peer has closed the connection, or has sent an invalid request. Neither must
            # terminate the launcher.
            pass
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
