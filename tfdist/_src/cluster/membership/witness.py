"""Tells the workers of other hosts which processes of this machine are dead.

A worker cannot tell the death of a process on another host from a network that is cut. What runs on
that host can, and stays when its workers die: their launcher.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import time
from functools import partial

from tfdist._src.cluster.auth.identity import REGROUP, Identity
from tfdist._src.cluster.membership import record
from tfdist._src.cluster.membership.inspection import look, reply
from tfdist._src.cluster.membership.place import here
from tfdist._src.cluster.membership.view import decode_member
from tfdist._src.cluster.membership.wire import FRAME_LIMIT
from tfdist._src.cluster.net.bind_address import claim
from tfdist._src.cluster.net.framing import Decoder, Header, WireError, encode
from tfdist._src.cluster.net.tls import Tls
from tfdist._src.cluster.net.wait_messages import Announce, say
from tfdist._src.cluster.rendezvous.acceptor import Acceptor
from tfdist._src.cluster.spec.topology import Topology, Worker
from tfdist._src.options import Options

_EXPECTED = 256
_STRANGERS = 16
_REQUEST_SECONDS = 20.0
_SEND_SECONDS = 1.0


class Witness:
    """Answers whoever asks whether a process of this machine is dead, without a thread of its own.

    Args:
        address: where it listens, `"host:port"`.
        options: `secret` and the TLS options authenticate both ends; `host` is that of the workers.
        announce: called with lines about rejected connections; writes to stderr by default.

    Raises:
        ClusterError: it cannot listen there.
        TlsError: the certificates are unusable.

    Attributes:
        address: where it listens.

    Example:
        >>> witness = Witness("127.0.0.1:50124", Options(secret="s"))
        >>> witness.serve()
        >>> witness.close()
    """

    def __init__(self, address: str, options: Options, announce: Announce = say) -> None:
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
        """Whether `serve` has to be called soon, even if nothing happens."""
        return bool(self._callers) or self._acceptor.is_busy

    def serve(self) -> None:
        """Handles what has arrived, without waiting."""
        for key, _ in self._selector.select(0):
            key.data()
        self._acceptor.tick()
        now = time.monotonic()
        for sock in [sock for sock, (_, deadline) in self._callers.items() if now >= deadline]:
            self._end(sock)

    def close(self) -> None:
        """Stops listening, and removes the records of the dead that it has been asked for."""
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
        """Reads a request, and answers it."""
        try:
            data = sock.recv(64 * 1024)
            frames = list(self._callers[sock][0].feed(data))
            if data and not frames:
                return  # the rest is still to come
            if frames:
                sock.settimeout(_SEND_SECONDS)  # it fits into the buffer of the kernel, or nearly
                sock.sendall(encode(self._answer(frames[0][0])))
        except BlockingIOError:
            return
        except Exception:
            pass  # one that has gone, or sends nonsense; the launcher goes on
        self._end(sock)

    def _answer(self, header: Header) -> Header:
        if header["kind"] != "inspect":
            raise WireError("it asks a launcher for what only a worker knows")
        place = decode_member(header.get("member")).place
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
