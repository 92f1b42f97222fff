"""Accepts connections and performs their handshakes, all in the thread that calls it."""

from __future__ import annotations

import errno
import selectors
import socket
import ssl
import time
from collections.abc import Callable
from typing import Any

from tfdist._src.cluster.auth.handshake import AnswerAs, Steps, TlsMismatch, listening, tls_problem
from tfdist._src.cluster.auth.identity import Identity
from tfdist._src.cluster.net.descriptors import close_on_fork
from tfdist._src.cluster.net.framing import WireError
from tfdist._src.cluster.net.sockets import tune
from tfdist._src.cluster.net.tls import Tls
from tfdist._src.cluster.net.wait_messages import Announce
from tfdist._src.cluster.rendezvous.handshakes import Handshakes, Pending
from tfdist._src.cluster.rendezvous.rejections import Rejections
from tfdist.errors import TfdistError

ACCEPT_SECONDS = 20.0
"""How long the handshake of a connection may take; its peer may have hundreds to open."""

_MAX_STRANGERS = 256
_FULL_SECONDS = 0.05
_AT_ONCE = 64
"""Connections accepted in one call, so that a flood cannot keep the caller from all else."""


class NotHere(WireError):
    """A worker of the job asks for what this one cannot do now; that deserves no line."""


class Acceptor:
    """Authenticates incoming connections; silent or slow strangers delay no one.

    When there are too many unauthenticated connections, the oldest one is closed of the address
    that has the most: a flood from one address only displaces itself.

    Args:
        selector: where the connections are registered, with a function to call as data.
        mine: the identity of this process.
        secret: the job's secret.
        tls: the TLS contexts; None for connections without TLS.
        expected: how many workers may connect at the same time; strangers get extra room.
        screen: inspects the identity of an authenticated peer, and raises WireError to reject it.
        on_accepted: receives a connection, non-blocking, once the peer is being told that it is
            accepted.
        announce: called with lines about rejected connections.
        strangers: how many unauthenticated connections there may be besides.
        answer_as: who to be for an admitted peer; `mine` by default.
        hang_ups: whether peers that end the connection themselves deserve a line.
    """

    def __init__(
        self,
        selector: selectors.BaseSelector,
        mine: Identity,
        secret: str,
        tls: Tls | None,
        expected: int,
        screen: Callable[[Identity], None],
        on_accepted: Callable[[socket.socket, Identity], None],
        announce: Announce,
        strangers: int | None = None,
        answer_as: AnswerAs | None = None,
        hang_ups: bool = True,
    ) -> None:
        self._mine = mine
        self._secret = secret
        self._tls = tls
        self._room = (_MAX_STRANGERS if strangers is None else strangers) + expected
        self._screen = screen
        self._answer_as = answer_as
        self._hang_ups = hang_ups
        self._on_accepted = on_accepted
        self._handshakes = Handshakes(selector)
        self._rejections = Rejections(announce)

    def accept(self, listener: socket.socket) -> None:
        """Accepts connections that wait at a non-blocking listener."""
        for _ in range(_AT_ONCE):
            try:
                sock, peer = listener.accept()
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE):
                    # Out of descriptors. It remains ready, so do not try again at once.
                    time.sleep(_FULL_SECONDS)
                return
            try:
                sock.setblocking(False)
                tune(sock)
                if self._tls:
                    sock = self._tls.wrap(sock, dialed=False)
            except OSError:  # the peer is gone
                sock.close()
                continue
            self._begin(close_on_fork(sock), (shown_ip(peer), peer[1]))

    @property
    def is_busy(self) -> bool:
        """Whether `tick` has to be called soon, even if nothing happens."""
        return bool(self._handshakes.pending) or self._rejections.unreported

    def tick(self) -> None:
        """Drops connections that are too slow, and reports rejections; call it regularly."""
        self._handshakes.tick()
        self._rejections.tick(time.monotonic())

    def close(self) -> None:
        """Closes the unauthenticated connections, without a line for each."""
        self._handshakes.close()
        self._rejections.close()

    def _begin(self, sock: socket.socket, peer: tuple[str, int]) -> None:
        address, port = peer

        def done(identity: Identity) -> None:
            self._on_accepted(sock, identity)

        def failed(error: Exception) -> None:
            self.reject(address, port, error)

        tls = self._tls is not None
        steps = _contained(listening(self._mine, self._secret, tls, self._screen, self._answer_as))
        deadline = time.monotonic() + ACCEPT_SECONDS
        self._make_room()
        try:
            self._handshakes.begin(Pending(sock, address, steps, deadline, done, failed))
        except OSError as error:  # there is no room in the kernel to watch it
            failed(error)

    def reject(self, address: str, port: int, error: Exception) -> None:
        """Reports that a connection is dropped, at the latest with others of its address.

        Args:
            address: its IP address.
            port: its port.
            error: why.
        """
        hung_up = isinstance(error, ConnectionError) and not self._hang_ups
        if hung_up or isinstance(error, NotHere):
            return
        reason = str(error)
        if isinstance(error, (TlsMismatch, ssl.SSLError)) and (problem := tls_problem(error)):
            reason = f"no TLS: {problem}"
        self._rejections.add(address, f"{address}:{port}", reason, time.monotonic())

    def _make_room(self) -> None:
        """Makes room for one more."""
        pending = self._handshakes.pending
        if len(pending) < self._room:
            return
        counts: dict[str, int] = {}
        for one in pending:
            counts[one.address] = counts.get(one.address, 0) + 1
        most = max(counts, key=lambda address: counts[address])
        oldest = next(one for one in pending if one.address == most)
        if not oldest.ended:
            oldest.on_failed(OSError("too many connections from one address"))
        self._handshakes.drop(oldest)


def shown_ip(name: tuple[Any, ...]) -> str:
    """The IP address of a socket's name; an IPv4-mapped IPv6 address as IPv4.

    Example:
        >>> shown_ip(("::ffff:10.0.0.9", 40000, 0, 0))
        '10.0.0.9'
    """
    return str(name[0]).removeprefix("::ffff:")


def _contained(steps: Steps) -> Steps:
    """The same steps; an error that nobody has foreseen ends one connection, not its thread."""
    try:
        return (yield from steps)
    except (OSError, WireError, TlsMismatch, TfdistError):
        raise
    except Exception as error:
        raise WireError(f"it caused an unexpected error: {error!r}") from error
