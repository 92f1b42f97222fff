"""Accepts connections and performs their handshakes, in the calling thread."""

import contextlib
import errno
import selectors
import socket
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from tfdist._src.cluster.auth import handshake
from tfdist._src.cluster.auth.identity import Identity
from tfdist._src.cluster.net.framing import WireError
from tfdist._src.cluster.net.sockets import close_on_fork, tune
from tfdist._src.cluster.net.tls import Tls, TlsSocket
from tfdist._src.cluster.net.wait_messages import Announce
from tfdist.errors import TfdistError

_CHUNK = 4096
_LINGER_SECONDS = 1.0


class PendingHandshake:
    """A connection on which the peer has not authenticated yet.

    Args:
        sock: non-blocking.
        address: the peer's IP address.
        steps: this end of the handshake.
        deadline: the `time.monotonic()` at which to give up.
        on_done: receives the peer's identity.
        on_failed: receives the error if authentication fails.
    """

    def __init__(
        self,
        sock: socket.socket,
        address: str,
        steps: handshake.Steps,
        deadline: float,
        on_done: Callable[[Identity], None],
        on_failed: Callable[[Exception], None],
    ) -> None:
        self.sock = sock
        self.address = address
        self.deadline = deadline
        self.on_done = on_done
        self.on_failed = on_failed
        self.ended = False  # failed, but still open until the peer has read the reason
        self.event = 0  # the `selectors` event for which the connection is registered
        self._steps = steps
        self._step = next(steps)
        self._received = bytearray()
        self._unsent = b""

    def advance(self) -> int | Identity:
        """Proceeds as far as possible without blocking.

        Returns:
            The `selectors` event to wait for, or the peer's identity once the handshake is
            complete.

        Raises:
            OSError: the connection ended, or TLS failed.
            WireError: the peer is not a tfdist worker, or was rejected.
            TlsMismatch: only one of the two ends uses TLS.
            TfdistError: this end dials, and the two ends are incompatible.
        """
        try:
            while True:
                wait, answer = self._do()
                if wait is not None:
                    return wait
                self._step = self._steps.send(answer)
        except StopIteration as end:
            self._check_all_read()
            identity: Identity = end.value
            return identity

    def _check_all_read(self) -> None:
        """Raises WireError if the peer has sent more than the handshake needs so far."""
        if self._received:
            raise WireError("it sent more than the handshake")

    def _do(self) -> tuple[int | None, bytes]:
        """Performs the current step; returns the event to wait for, or None and the answer."""
        step = self._step
        if isinstance(step, handshake.ReadBytes):
            return self._read(step.count, step.some)
        if isinstance(step, handshake.WriteBytes):
            self._unsent = self._unsent or step.data
            while self._unsent:
                try:
                    self._unsent = self._unsent[self.sock.send(self._unsent) :]
                except BlockingIOError:
                    return selectors.EVENT_WRITE, b""
            return None, b""
        assert isinstance(self.sock, TlsSocket)
        self._check_all_read()
        if wait := self.sock.begin():
            return wait, b""
        return None, self.sock.certificate_digests()

    def _read(self, count: int, some: bool) -> tuple[int | None, bytes]:
        while len(self._received) < (1 if some else count):
            try:
                data = self.sock.recv(_CHUNK)
            except BlockingIOError:
                return selectors.EVENT_READ, b""
            if not data:
                raise ConnectionError("connection closed")
            self._received += data
        answer = bytes(self._received[:count])
        del self._received[:count]
        return None, answer


class Handshakes:
    """The handshakes of one thread; a slow handshake does not delay the others.

    Args:
        selector: registers the connections, with a function to call as data.
    """

    def __init__(self, selector: selectors.BaseSelector) -> None:
        self._selector = selector
        self.pending: dict[PendingHandshake, None] = {}  # in the order of their start

    def begin(self, pending: PendingHandshake) -> None:
        """Begins a handshake; owns its connection until it is done."""
        self.pending[pending] = None
        pending.event = selectors.EVENT_READ
        try:
            self._selector.register(pending.sock, pending.event, partial(self._serve, pending))
        except BaseException:
            self.drop(pending)
            raise
        self._serve(pending)

    def tick(self) -> None:
        """Drops connections that are too slow; call it regularly."""
        now = time.monotonic()
        for pending in [p for p in self.pending if now >= p.deadline]:
            if pending.ended:
                self.drop(pending)
            else:
                self._fail(pending, TimeoutError("it was silent or too slow"))

    def drop(self, pending: PendingHandshake) -> None:
        """Closes a connection at once."""
        del self.pending[pending]
        with contextlib.suppress(KeyError):  # not registered
            self._selector.unregister(pending.sock)
        pending.sock.close()

    def close(self) -> None:
        """Closes all connections."""
        for pending in list(self.pending):
            self.drop(pending)

    def _serve(self, pending: PendingHandshake) -> None:
        """Advances a connection that is ready."""
        if pending not in self.pending:
            return None
        if pending.ended:
            try:
                if socket.socket.recv(pending.sock, 4096):
                    return None
            except BlockingIOError:
                return None
            except OSError:
                pass
            return self.drop(pending)
        try:
            result = pending.advance()
        except (OSError, WireError, handshake.TlsMismatch, TfdistError) as error:
            self._fail(pending, error)
        except BaseException:
            self._fail(pending, WireError("it caused an unexpected error"))
            raise
        else:
            if isinstance(result, Identity):
                del self.pending[pending]
                self._selector.unregister(pending.sock)
                pending.on_done(result)
            elif result != pending.event:
                pending.event = result
                self._selector.modify(pending.sock, result, partial(self._serve, pending))

    def _fail(self, pending: PendingHandshake, error: Exception) -> None:
        # The peer reads the reason, if one was sent, and closes the connection. Closing it here,
        # with unread input, would discard the reason.
        pending.ended = True
        pending.deadline = time.monotonic() + _LINGER_SECONDS
        try:
            socket.socket.shutdown(pending.sock, socket.SHUT_WR)
            pending.event = selectors.EVENT_READ
            self._selector.modify(pending.sock, pending.event, partial(self._serve, pending))
        except OSError:
            self.drop(pending)
        pending.on_failed(error)


_EVERY_SECONDS = 10.0
_MAX_ADDRESSES = 1000


@dataclass
class _Unreported:
    """Rejections of one address since the last line about it."""

    since: float
    count: int = 0
    reason: str = ""


class Rejections:
    """The rejected connections, by address.

    Args:
        announce: called with each line.

    Example:
        >>> rejections = Rejections(print)
        >>> rejections.add("10.0.0.9", "10.0.0.9:40000", "it sent no hello", now=0.0)
        dropped a connection from 10.0.0.9:40000: it sent no hello
        >>> for second in range(1, 4):
        ...     rejections.add("10.0.0.9", "10.0.0.9:40001", "it sent no hello", now=second)
        >>> rejections.tick(now=12.0)
        dropped 3 more connections from 10.0.0.9; the last: it sent no hello
    """

    def __init__(self, announce: Announce) -> None:
        self._announce = announce
        self._addresses: dict[str, _Unreported] = {}

    def add(self, address: str, peer: str, reason: str, now: float) -> None:
        """Notes a rejected connection.

        Args:
            address: its IP address.
            peer: its address and port.
            reason: why it was rejected.
            now: the time, in seconds of any clock.
        """
        known = self._addresses.get(address)
        if known is None and len(self._addresses) < _MAX_ADDRESSES:
            self._addresses[address] = _Unreported(now)
            self._announce(f"dropped a connection from {peer}: {reason}")
            return
        if known is None:  # a flood from many addresses
            known = self._addresses.setdefault("other addresses", _Unreported(now))
        known.count += 1
        known.reason = reason

    @property
    def unreported(self) -> bool:
        """Whether there are rejections that `tick` has yet to report."""
        return any(one.count for one in self._addresses.values())

    def tick(self, now: float) -> None:
        """Reports the rejections of periods that have ended.

        Forgets the addresses without rejections in these periods.
        """
        for address, one in list(self._addresses.items()):
            if now - one.since >= _EVERY_SECONDS:
                self._report(address, one)
                del self._addresses[address]
                if one.count:
                    self._addresses[address] = _Unreported(now)

    def close(self) -> None:
        """Reports the rest."""
        for address, one in self._addresses.items():
            self._report(address, one)
        self._addresses.clear()

    def _report(self, address: str, one: _Unreported) -> None:
        if one.count:
            connections = "connection" if one.count == 1 else "connections"
            self._announce(
                f"dropped {one.count} more {connections} from {address}; the last: {one.reason}"
            )


ACCEPT_SECONDS = 20.0
"""The time limit of a handshake; the peer may have hundreds of connections to open."""

_MAX_STRANGERS = 256
_FULL_SECONDS = 0.05
_AT_ONCE = 64
"""Connections accepted in one call, so that a flood cannot block the caller's other work."""


class CannotServe(WireError):
    """This process cannot serve a request of one of the job's workers now; not reported."""


class Acceptor:
    """Authenticates incoming connections; silent or slow strangers delay no other peer.

    If there are too many unauthenticated connections, the oldest one of the address with the most
    connections is closed. A flood from one address therefore only displaces itself.

    Args:
        selector: registers the connections, with a function to call as data.
        mine: the identity of this process.
        secret: the job's secret.
        tls: the TLS contexts; None for connections without TLS.
        expected: the maximum number of workers that connect at the same time.
        screen: inspects the identity of an authenticated peer, and raises WireError to reject it.
        on_accepted: receives a connection, non-blocking, after the acceptance was sent to the peer.
        announce: called with lines about rejected connections.
        strangers: the maximum number of additional unauthenticated connections.
        answer_as: returns the identity to present to an admitted peer; `mine` by default.
        hang_ups: whether to report peers that end the connection themselves.
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
        answer_as: handshake.AnswerAs | None = None,
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
        """Accepts pending connections of a non-blocking listener."""
        for _ in range(_AT_ONCE):
            try:
                sock, peer = listener.accept()
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE):
                    # Out of descriptors. The listener remains ready, so do not retry at once.
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
        """Whether `tick` must be called soon, even without an event."""
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
        steps = _contained(
            handshake.listening(self._mine, self._secret, tls, self._screen, self._answer_as)
        )
        deadline = time.monotonic() + ACCEPT_SECONDS
        self._make_room()
        try:
            self._handshakes.begin(PendingHandshake(sock, address, steps, deadline, done, failed))
        except OSError as error:  # the kernel has no room to watch the connection
            failed(error)

    def reject(self, address: str, port: int, error: Exception) -> None:
        """Reports a dropped connection, at once or later together with others of its address.

        Args:
            address: its IP address.
            port: its port.
            error: the reason.
        """
        hung_up = isinstance(error, ConnectionError) and not self._hang_ups
        if hung_up or isinstance(error, CannotServe):
            return
        reason = str(error)
        if isinstance(error, (handshake.TlsMismatch, ssl.SSLError)) and (
            problem := handshake.tls_problem(error)
        ):
            reason = f"no TLS: {problem}"
        self._rejections.add(address, f"{address}:{port}", reason, time.monotonic())

    def _make_room(self) -> None:
        """Makes room for one more connection."""
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
    """Returns the IP address in a socket's name; an IPv4-mapped IPv6 address as IPv4.

    Example:
        >>> shown_ip(("::ffff:10.0.0.9", 40000, 0, 0))
        '10.0.0.9'
    """
    return str(name[0]).removeprefix("::ffff:")


def _contained(steps: handshake.Steps) -> handshake.Steps:
    """Runs the steps; an unforeseen error ends only the connection, not the thread."""
    try:
        return (yield from steps)
    except (OSError, WireError, handshake.TlsMismatch, TfdistError):
        raise
    except Exception as error:
        raise WireError(f"it caused an unexpected error: {error!r}") from error
