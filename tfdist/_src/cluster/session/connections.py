"""The control connections of a process, served and monitored by one thread."""

import contextlib
import json
import os
import selectors
import socket
import threading
import time
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from tfdist._src.cluster.net.framing import FRAME_LIMIT, Decoder, Header, WireError, encode


class ReplaceableListener(Protocol):
    """A listener at this process's address that frees the address on request."""

    def pause(self) -> None:
        """Stops listening; returns once the address is free."""

    def resume(self) -> None:
        """Listens again."""


class LocalAddress:
    """This process's address, with at most one listener at a time.

    Firewalls may allow no other port between the workers. So the connections between workers have
    precedence over the tenant, a listener that uses the address the rest of the time.
    """

    def __init__(self) -> None:
        self._tenant: ReplaceableListener | None = None

    @property
    def tenant(self) -> ReplaceableListener | None:
        """The tenant, if any."""
        return self._tenant

    def let(self, tenant: ReplaceableListener) -> None:
        """Lets a tenant listen at this address, except inside `free`."""
        self._tenant = tenant
        tenant.resume()

    def release(self) -> None:
        """Forgets the tenant, which keeps listening for this process's next session."""
        self._tenant = None

    @contextlib.contextmanager
    def free(self) -> Iterator[None]:
        """Keeps the address free of the tenant inside a `with` block."""
        if self._tenant:
            self._tenant.pause()
        try:
            yield
        finally:
            if self._tenant:
                self._tenant.resume()

    def evict(self) -> None:
        """Frees the address for good."""
        tenant, self._tenant = self._tenant, None
        if tenant:
            tenant.pause()


REPORT_LIMIT = 16 * 1024
"""The maximum size of a rank's report, in bytes."""

Reporter = Callable[[], dict[str, Any]]


class LocalReport:
    """The report of this process; empty until `made_by` registers a reporter."""

    def __init__(self) -> None:
        self._reporter: Reporter = dict

    def made_by(self, reporter: Reporter) -> None:
        """Registers the function that makes the report.

        Args:
            reporter: returns a small JSON-serializable dict. It must not block, because other
                workers wait for the thread that calls it.
        """
        self._reporter = reporter

    def encoded(self) -> bytes:
        """Returns the report as JSON; an object with the single key "error" if it fails."""
        try:
            report = json.dumps(self._reporter()).encode()
        except Exception as error:  # the thread of the connections must survive
            return _error(f"its report failed ({type(error).__name__})")
        return report if len(report) <= REPORT_LIMIT else _error("its report is too long")


def _error(text: str) -> bytes:
    return json.dumps({"error": text}).encode()


class Gathering:
    """Collects the reports of all ranks as they arrive.

    Args:
        number: identifies the request, so that late replies to earlier requests do not count.
        ranks: the ranks that are asked.
        on_complete: called in the thread of the connections once no report is missing.
    """

    def __init__(self, number: int, ranks: Iterable[int], on_complete: Callable[[], object]):
        self.number = number
        self.reports: dict[int, bytes] = {}
        self._missing = set(ranks)
        self._on_complete = on_complete

    @property
    def is_complete(self) -> bool:
        """Whether no more reports will arrive."""
        return not self._missing

    def add(self, rank: int, report: bytes) -> None:
        """Adds a rank's report, which may be malformed."""
        if rank in self._missing and len(report) <= REPORT_LIMIT:
            self.reports[rank] = report
        self.give_up(rank)

    def give_up(self, rank: int) -> None:
        """Notes that a rank will send no more reports."""
        if rank in self._missing:
            self._missing.discard(rank)
            if not self._missing:
                self._on_complete()


@dataclass(frozen=True)
class Presence:
    """Rank 0's knowledge of another rank, from their connection.

    Attributes:
        silence: seconds since the rank was last heard from; None if it is not connected.
        gone: the reason why it is not connected, such as "has left the job"; "" if it is connected.
    """

    silence: float | None
    gone: str = ""


_BEAT = encode({"kind": "beat"})
_BEAT_SECONDS = 15.0
_POLL_SECONDS = 0.5
_CHUNK = 256 * 1024


class Handler(Protocol):
    """Receives the events of the connections, in the thread of `Connections`."""

    def on_frame(self, rank: int, header: Header, payload: bytes) -> None:
        """Called when a frame arrives; raises KeyError, TypeError or ValueError if malformed."""

    def on_end(self, rank: int, reason: str, *, silent: bool) -> None:
        """Called once when a connection breaks, and never after `drop` or `close`."""

    def on_tick(self, now: float) -> None:
        """Called about twice a second with `time.monotonic()`."""


class _Connection:
    """One connection and its outgoing data."""

    def __init__(self, sock: socket.socket, now: float) -> None:
        self.sock = sock
        self.decoder = Decoder(FRAME_LIMIT)
        self.lock = threading.Lock()  # guards `out` and the socket
        self.out: deque[memoryview] = deque()  # frames are shared with other connections
        self.last_heard = now
        self.last_sent = now
        self.dropped = False
        self.shut = False

    def send(self, data: bytes) -> None:
        """Sends as much as possible without blocking, and buffers the rest."""
        with self.lock:
            if self.shut:
                return
            if data:
                self.out.append(memoryview(data))
            try:
                while self.out:
                    part = self.out[0][:_CHUNK]
                    rest = self.out[0][self.sock.send(part) :]
                    self.last_sent = time.monotonic()
                    if rest:
                        self.out[0] = rest
                    else:
                        self.out.popleft()
            except BlockingIOError:
                pass
            except OSError:  # the next read reports the reason
                self.out.clear()


class Connections:
    """The connections to other ranks.

    Args:
        sockets: a connected socket for each rank.
        handler: receives the events.
        heartbeat_timeout: seconds without a heartbeat after which a connection is considered
            broken.
    """

    def __init__(
        self, sockets: Mapping[int, socket.socket], handler: Handler, heartbeat_timeout: float
    ) -> None:
        now = time.monotonic()
        self._by_rank = {rank: _Connection(sock, now) for rank, sock in sockets.items()}
        self._handler = handler
        self._timeout = heartbeat_timeout
        self._interval = min(_BEAT_SECONDS, heartbeat_timeout / 4)
        self._unsent: set[int] = set()  # ranks with connections that wait to be written to
        self._on_wake: list[Callable[[], object]] = []
        self._leaving = False
        self._close_by: float | None = None
        self._wake_receiver, self._wake_sender = socket.socketpair()
        for sock in (self._wake_receiver, self._wake_sender, *sockets.values()):
            sock.setblocking(False)
        self._thread = threading.Thread(target=self._run, name="tfdist-connections", daemon=True)
        _alive.add(self)

    def start(self) -> None:
        """Starts the thread; not part of the constructor, so that the handler can be set up."""
        if self._by_rank:
            self._thread.start()
        else:
            self.close_descriptors()

    def send(self, rank: int, frame: bytes) -> None:
        """Sends a frame to a rank, from any thread and without blocking."""
        if connection := self._by_rank.get(rank):
            connection.send(frame)
            if connection.out:
                self._unsent.add(rank)
                self._wake()

    def broadcast(self, frame: bytes) -> None:
        """Sends a frame to every rank that is still connected."""
        for rank in list(self._by_rank):
            self.send(rank, frame)

    def silence(self, rank: int) -> float | None:
        """Seconds since a rank was last heard from; None if it is not connected."""
        connection = self._by_rank.get(rank)
        return None if connection is None else max(0.0, time.monotonic() - connection.last_heard)

    @property
    def ranks(self) -> list[int]:
        """The ranks that are connected."""
        return list(self._by_rank)

    @property
    def waker(self) -> int:
        """The descriptor of a socket that wakes the thread by each byte; -1 without a thread."""
        return self._wake_sender.fileno()

    def on_wake(self, callback: Callable[[], object]) -> Callable[[], None]:
        """Registers a callback for the thread to call whenever it is woken; it must not block.

        Returns:
            A function that removes the callback; to be called once.
        """
        self._on_wake.append(callback)
        return lambda: self._on_wake.remove(callback)

    def drop(self, rank: int) -> None:
        """Closes a connection without calling `on_end`; only from within the handler."""
        self._by_rank[rank].dropped = True

    def close(self, last_frame: bytes, linger: float) -> None:
        """Sends buffered data and a last frame, closes all connections and stops the thread.

        Args:
            last_frame: sent to all ranks. A peer closes its connection once it has read this frame,
                so `on_end` is no longer called.
            linger: seconds that this may take.
        """
        self._leaving = True
        self.broadcast(last_frame)
        self._close_by = time.monotonic() + linger
        self._wake()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(linger + 1.0)

    def close_descriptors(self) -> None:
        """Closes only the descriptors, for a forked child.

        The child's copies would keep the connections open after its parent has died.
        """
        sockets = (connection.sock for connection in self._by_rank.values())
        for sock in (self._wake_receiver, self._wake_sender, *sockets):
            sock.close()

    def _wake(self) -> None:
        try:
            self._wake_sender.send(b"!")
        except OSError:  # a wake-up is already pending, or the thread has ended
            pass

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._wake_receiver, selectors.EVENT_READ)
            for rank, connection in self._by_rank.items():
                selector.register(connection.sock, selectors.EVENT_READ, rank)
            last = next_watch = time.monotonic()
            poll_seconds = min(_POLL_SECONDS, self._interval)
            # This loop never walks through all connections just because one of them is readable.
            while self._by_rank and not self._closed():
                while self._unsent:
                    if unsent := self._by_rank.get(rank := self._unsent.pop()):
                        both = selectors.EVENT_READ | selectors.EVENT_WRITE
                        selector.modify(unsent.sock, both, rank)
                events = selector.select(poll_seconds)
                now = time.monotonic()
                self._handle(selector, events, now)
                # After this process was suspended, its peers' silence proves nothing.
                if now - last > self._timeout / 2:
                    for connection in self._by_rank.values():
                        connection.last_heard = now
                last = now
                if now >= next_watch and not self._leaving:
                    next_watch = now + poll_seconds
                    self._watch(selector, now)
            for rank in list(self._by_rank):
                self._end(selector, rank)
        self._wake_receiver.close()
        self._wake_sender.close()

    def _closed(self) -> bool:
        """Whether closing has finished; shuts down each stream once its data is sent."""
        if self._close_by is None:
            return False
        for connection in self._by_rank.values():
            with connection.lock:
                if not connection.out and not connection.shut:
                    connection.shut = True
                    try:
                        connection.sock.shutdown(socket.SHUT_WR)
                    except OSError:  # the peer was faster
                        pass
        return time.monotonic() >= self._close_by

    def _handle(
        self,
        selector: selectors.BaseSelector,
        events: list[tuple[selectors.SelectorKey, int]],
        now: float,
    ) -> None:
        for key, event in events:
            rank: int | None = key.data
            if rank is None:
                self._wake_receiver.recv(4096)
                for callback in [] if self._leaving else list(self._on_wake):
                    _call(callback)
                continue
            connection = self._by_rank[rank]
            if event & selectors.EVENT_WRITE:
                connection.send(b"")
                if not connection.out:
                    selector.modify(connection.sock, selectors.EVENT_READ, rank)
            if event & selectors.EVENT_READ:
                connection.last_heard = now
                reason = self._read(rank, connection)
                if reason or connection.dropped:
                    self._end(selector, rank)
                if reason and not connection.dropped and not self._leaving:
                    self._handler.on_end(rank, reason, silent=False)

    def _read(self, rank: int, connection: _Connection) -> str | None:
        """Reads the available data; returns the reason if the connection is unusable."""
        try:
            with connection.lock:
                data = connection.sock.recv(_CHUNK)
        except BlockingIOError:
            return None
        except OSError as error:
            return f"connection broken ({error.strerror or error})"
        if not data:
            return "connection closed"
        try:
            for header, payload in connection.decoder.feed(data):
                if not self._leaving and not connection.dropped and header["kind"] != "beat":
                    self._handler.on_frame(rank, header, payload)
        except (WireError, LookupError, ArithmeticError, TypeError, ValueError) as error:
            return f"it sent a malformed frame ({error!r})"
        return None

    def _watch(self, selector: selectors.BaseSelector, now: float) -> None:
        for rank, connection in list(self._by_rank.items()):
            if now - connection.last_heard > self._timeout:
                reason = f"no sign of life for {self._timeout:g} s"
                self._handler.on_end(rank, reason, silent=True)
                self._end(selector, rank)
            elif now - connection.last_sent >= self._interval:  # anything sent is a sign of life
                self.send(rank, _BEAT)
        self._handler.on_tick(now)

    def _end(self, selector: selectors.BaseSelector, rank: int) -> None:
        connection = self._by_rank[rank]
        selector.unregister(connection.sock)
        # A copy, because other threads may be iterating over it.
        self._by_rank = {other: kept for other, kept in self._by_rank.items() if other != rank}
        connection.sock.close()


def _call(callback: Callable[[], object]) -> None:
    try:
        callback()
    except Exception:  # the thread must survive
        traceback.print_exc()


_alive: weakref.WeakSet[Connections] = weakref.WeakSet()


def _after_fork() -> None:
    for connections in list(_alive):
        connections.close_descriptors()


os.register_at_fork(after_in_child=_after_fork)
