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
        sock: the connection, a non-blocking socket.
        address: the peer's IP address.
        steps: the generator that performs this end's part of the handshake.
        deadline: the `time.monotonic()` at which to give up.
        on_done: called with the peer's identity when the handshake is complete.
        on_failed: called with the error if the handshake fails.
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
        self.ended = False  # whether it has failed and only stays open until the peer closes it
        self.event = 0  # the `selectors` event for which the connection is registered
        self._steps = steps
        self._step = next(steps)
        self._received = bytearray()
        self._unsent = b""

    def advance(self) -> int | Identity:
        """Continues the handshake as far as possible without blocking.

        Returns:
            The peer's identity if the handshake is complete. Otherwise, the `selectors` event to
            wait for before the next call of this method.

        Raises:
            OSError: the connection ended, or the TLS handshake failed.
            WireError: the peer is not a tfdist worker, or this process has rejected the peer.
            TlsMismatch: only one of the two ends uses TLS.
            TfdistError: this process is the dialer, and the two ends are incompatible.
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
        """Raises WireError if the peer has sent data that the handshake does not expect."""
        if self._received:
            raise WireError("it sent more than the handshake")

    def _do(self) -> tuple[int | None, bytes]:
        """Performs the current step of the generator, unless that would block.

        Returns:
            The `selectors` event to wait for if the step would block, or else None; and the answer
            to send to the generator.
        """
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
    """Performs many handshakes in one thread, so that a slow peer does not delay the others.

    Args:
        selector: the selector of the thread. The data of each registered connection is the function
            to call when the connection is ready.
    """

    def __init__(self, selector: selectors.BaseSelector) -> None:
        self._selector = selector
        self.pending: dict[PendingHandshake, None] = {}  # the oldest handshake is the first one

    def begin(self, pending: PendingHandshake) -> None:
        """Starts a handshake; takes ownership of its connection until the handshake is complete."""
        self.pending[pending] = None
        pending.event = selectors.EVENT_READ
        try:
            self._selector.register(pending.sock, pending.event, partial(self._serve, pending))
        except BaseException:
            self.drop(pending)
            raise
        self._serve(pending)

    def tick(self) -> None:
        """Drops connections that are too slow; must be called regularly."""
        now = time.monotonic()
        for pending in [p for p in self.pending if now >= p.deadline]:
            if pending.ended:
                self.drop(pending)
            else:
                self._fail(pending, TimeoutError("it was silent or too slow"))

    def drop(self, pending: PendingHandshake) -> None:
        """Closes a connection immediately."""
        del self.pending[pending]
        with contextlib.suppress(KeyError):  # not registered
            self._selector.unregister(pending.sock)
        pending.sock.close()

    def close(self) -> None:
        """Closes all connections."""
        for pending in list(self.pending):
            self.drop(pending)

    def _serve(self, pending: PendingHandshake) -> None:
        """Continues the handshake of a connection that is ready."""
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
        # Let the peer close the connection after it has read the reason, if a reason was sent. If
        # this process closed the connection while there is unread input, the kernel could discard
        # the reason.
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
    """The rejected connections of one address since the last message about the address."""

    since: float
    count: int = 0
    reason: str = ""


class Rejections:
    """Reports rejected connections, with at most one message per IP address in 10 seconds.

    Args:
        announce: called with each message.

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
        """Reports a rejected connection immediately, or counts it for a later message.

        Args:
            address: the IP address of the peer.
            peer: the IP address and port of the peer.
            reason: the reason for the rejection.
            now: the current time in seconds, on the same clock for all calls.
        """
        known = self._addresses.get(address)
        if known is None and len(self._addresses) < _MAX_ADDRESSES:
            self._addresses[address] = _Unreported(now)
            self._announce(f"dropped a connection from {peer}: {reason}")
            return
        if known is None:  # too many addresses to count them separately
            known = self._addresses.setdefault("other addresses", _Unreported(now))
        known.count += 1
        known.reason = reason

    @property
    def unreported(self) -> bool:
        """Whether there are rejections that have not been reported yet."""
        return any(one.count for one in self._addresses.values())

    def tick(self, now: float) -> None:
        """Reports the counted rejections of each address after 10 seconds.

        If an address had no more rejections in these 10 seconds, it is forgotten.
        """
        for address, one in list(self._addresses.items()):
            if now - one.since >= _EVERY_SECONDS:
                self._report(address, one)
                del self._addresses[address]
                if one.count:
                    self._addresses[address] = _Unreported(now)

    def close(self) -> None:
        """Reports all counted rejections."""
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
"""The maximum number of connections accepted in one call, so that a flood cannot block the
caller's other work."""


class CannotServe(WireError):
    """Raised to reject a worker of the job that this process cannot serve now.

    Unlike other rejections, this one is not reported to the user.
    """


class Acceptor:
    """Accepts connections and authenticates the peers. A slow peer does not delay the others.

    The number of unauthenticated connections is limited. At the limit, each new connection replaces
    the oldest connection of the IP address with the most connections. If one address opens very
    many connections, it therefore only loses its own connections.

    Args:
        selector: the selector of the calling thread. The data of each registered connection is the
            function to call when the connection is ready.
        mine: the identity of this process.
        secret: the job's secret.
        tls: the TLS contexts; None if the job does not use TLS.
        expected: the maximum number of workers that connect at the same time.
        screen: called with the identity of an authenticated peer; raises WireError to reject the
            peer.
        on_accepted: called with a non-blocking connection and the identity of the peer, after this
            process has told the peer that it is accepted.
        announce: called with each message about a rejected connection.
        strangers: the maximum number of unauthenticated connections in addition to `expected`.
        answer_as: called with the identity of an admitted peer; returns the identity that this
            process sends to that peer. By default, this process sends `mine`.
        hang_ups: whether to report peers that close the connection themselves.
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
        """Accepts the pending connections of a non-blocking, listening socket."""
        for _ in range(_AT_ONCE):
            try:
                sock, peer = listener.accept()
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE):
                    # The process is out of file descriptors. Sleep, because the listening socket
                    # remains ready and the caller would immediately try again.
                    time.sleep(_FULL_SECONDS)
                return
            try:
                sock.setblocking(False)
                tune(sock)
                if self._tls:
                    sock = self._tls.wrap(sock, dialed=False)
            except OSError:  # the peer has closed the connection
                sock.close()
                continue
            self._begin(close_on_fork(sock), (shown_ip(peer), peer[1]))

    @property
    def is_busy(self) -> bool:
        """Whether `tick` must be called soon, even if no connection is ready."""
        return bool(self._handshakes.pending) or self._rejections.unreported

    def tick(self) -> None:
        """Drops slow connections and reports rejections; must be called regularly."""
        self._handshakes.tick()
        self._rejections.tick(time.monotonic())

    def close(self) -> None:
        """Closes the unauthenticated connections without reporting them."""
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
        except OSError as error:  # the selector cannot register another connection
            failed(error)

    def reject(self, address: str, port: int, error: Exception) -> None:
        """Reports a rejected connection, either immediately or later (see `Rejections`).

        Args:
            address: the IP address of the peer.
            port: the port of the peer.
            error: the reason for the rejection.
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
        """Closes a connection if the number of connections has reached the limit."""
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
    """Returns the IP address of a peer; converts an IPv4-mapped IPv6 address to IPv4.

    Args:
        name: the address of the peer, as returned by `socket.accept`.

    Example:
        >>> shown_ip(("::ffff:10.0.0.9", 40000, 0, 0))
        '10.0.0.9'
    """
    return str(name[0]).removeprefix("::ffff:")


def _contained(steps: handshake.Steps) -> handshake.Steps:
    """Converts an unexpected error of the handshake to WireError, so that the thread survives."""
    try:
        return (yield from steps)
    except (OSError, WireError, handshake.TlsMismatch, TfdistError):
        raise
    except Exception as error:
        raise WireError(f"it caused an unexpected error: {error!r}") from error
