"""The control connections of a process. One thread serves and monitors all of them."""

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
    """A listener at the address of this process that can release the address temporarily."""

    def pause(self) -> None:
        """Stops listening; returns when other sockets can use the address."""

    def resume(self) -> None:
        """Listens again."""


class LocalAddress:
    """The address of this process, at which only one listener can listen at a time.

    Firewalls may allow no other port between the workers. While the workers open connections to one
    another, they must therefore use this address. The rest of the time, another listener, the
    tenant, may use the address.
    """

    def __init__(self) -> None:
        self._tenant: ReplaceableListener | None = None

    @property
    def tenant(self) -> ReplaceableListener | None:
        """The listener that currently uses the address, if any."""
        return self._tenant

    def let(self, tenant: ReplaceableListener) -> None:
        """Lets a tenant listen at this address, except during `free`."""
        self._tenant = tenant
        tenant.resume()

    def release(self) -> None:
        """Forgets the tenant without stopping it, so that the next session can use it."""
        self._tenant = None

    @contextlib.contextmanager
    def free(self) -> Iterator[None]:
        """Stops the tenant during a `with` block, so that other sockets can use the address."""
        if self._tenant:
            self._tenant.pause()
        try:
            yield
        finally:
            if self._tenant:
                self._tenant.resume()

    def evict(self) -> None:
        """Stops the tenant permanently."""
        tenant, self._tenant = self._tenant, None
        if tenant:
            tenant.pause()


REPORT_LIMIT = 16 * 1024
"""The maximum size of a rank's report, in bytes."""

Reporter = Callable[[], dict[str, Any]]


class LocalReport:
    """The report of this process about its state. It is empty until `made_by` is called."""

    def __init__(self) -> None:
        self._reporter: Reporter = dict

    def made_by(self, reporter: Reporter) -> None:
        """Registers the function that returns the report.

        Args:
            reporter: returns a small dict that can be serialized as JSON. It must not block,
                because the thread that calls it also serves the connections to other workers.
        """
        self._reporter = reporter

    def encoded(self) -> bytes:
        """Returns the report as JSON. If the reporter fails, the only key is "error"."""
        try:
            report = json.dumps(self._reporter()).encode()
        except Exception as error:  # an error must not end the thread of the connections
            return _error(f"its report failed ({type(error).__name__})")
        return report if len(report) <= REPORT_LIMIT else _error("its report is too long")


def _error(text: str) -> bytes:
    return json.dumps({"error": text}).encode()


class Gathering:
    """Collects the reports of several ranks as they arrive.

    Args:
        number: the number of the request. Late replies to earlier requests have other numbers.
        ranks: the ranks that have been asked for a report.
        on_complete: called in the thread of the connections when no more reports are expected.
    """

    def __init__(self, number: int, ranks: Iterable[int], on_complete: Callable[[], object]):
        self.number = number
        self.reports: dict[int, bytes] = {}
        self._missing = set(ranks)
        self._on_complete = on_complete

    @property
    def is_complete(self) -> bool:
        """Whether no more reports are expected."""
        return not self._missing

    def add(self, rank: int, report: bytes) -> None:
        """Adds the report of a rank. The content of the report is not checked."""
        if rank in self._missing and len(report) <= REPORT_LIMIT:
            self.reports[rank] = report
        self.give_up(rank)

    def give_up(self, rank: int) -> None:
        """Stops waiting for the report of a rank."""
        if rank in self._missing:
            self._missing.discard(rank)
            if not self._missing:
                self._on_complete()


@dataclass(frozen=True)
class Presence:
    """The state of rank 0's connection to another rank.

    Attributes:
        silence: the number of seconds since rank 0 last received data from the rank. None if the
            rank is not connected.
        gone: the reason why the rank is not connected, such as "has left the job". "" if the rank
            is connected.
    """

    silence: float | None
    gone: str = ""


_BEAT = encode({"kind": "beat"})
_BEAT_SECONDS = 15.0
_POLL_SECONDS = 0.5
_CHUNK = 256 * 1024


class Handler(Protocol):
    """Handles the events of `Connections`, which calls these methods in its thread."""

    def on_frame(self, rank: int, header: Header, payload: bytes) -> None:
        """Handles a frame; raises KeyError, TypeError or ValueError if the frame is malformed."""

    def on_end(self, rank: int, reason: str, *, silent: bool) -> None:
        """Called once when a connection breaks, but not after `drop` or `close`."""

    def on_tick(self, now: float) -> None:
        """Called about twice a second with `time.monotonic()`."""


class _Connection:
    """One connection and its outgoing data."""

    def __init__(self, sock: socket.socket, now: float) -> None:
        self.sock = sock
        self.decoder = Decoder(FRAME_LIMIT)
        self.lock = threading.Lock()  # guards `out` and the socket
        self.out: deque[memoryview] = deque()  # the unsent frames; other connections may share them
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
            except OSError:  # reading from the socket will report the same reason
                self.out.clear()


class Connections:
    """The connections to other ranks, and the thread that serves them.

    Args:
        sockets: a connected socket for each rank.
        handler: the object that handles the events of the connections.
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
        self._unsent: set[int] = set()  # the ranks for which some data has not been sent yet
        self._on_wake: list[Callable[[], object]] = []
        self._leaving = False
        self._close_by: float | None = None
        self._wake_receiver, self._wake_sender = socket.socketpair()
        for sock in (self._wake_receiver, self._wake_sender, *sockets.values()):
            sock.setblocking(False)
        self._thread = threading.Thread(target=self._run, name="tfdist-connections", daemon=True)
        _alive.add(self)

    def start(self) -> None:
        """Starts the thread.

        The constructor does not start the thread, so that the handler can first complete its own
        initialization.
        """
        if self._by_rank:
            self._thread.start()
        else:
            self.close_descriptors()

    def send(self, rank: int, frame: bytes) -> None:
        """Sends a frame to a rank without blocking; can be called in any thread."""
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
        """Returns the seconds since a rank last sent data; None if the rank is not connected."""
        connection = self._by_rank.get(rank)
        return None if connection is None else max(0.0, time.monotonic() - connection.last_heard)

    @property
    def ranks(self) -> list[int]:
        """The ranks that are connected."""
        return list(self._by_rank)

    @property
    def waker(self) -> int:
        """The file descriptor of a socket; writing a byte to the socket wakes the thread.

        -1 if there is no thread.
        """
        return self._wake_sender.fileno()

    def on_wake(self, callback: Callable[[], object]) -> Callable[[], None]:
        """Registers a callback that the thread calls each time that it is woken.

        Args:
            callback: the callback, which must not block.

        Returns:
            A function that removes the callback. It may be called only once.
        """
        self._on_wake.append(callback)
        return lambda: self._on_wake.remove(callback)

    def drop(self, rank: int) -> None:
        """Closes a connection without calling `on_end`. Only the handler may call this."""
        self._by_rank[rank].dropped = True

    def close(self, last_frame: bytes, linger: float) -> None:
        """Sends all buffered data and a last frame, closes all connections and stops the thread.

        Args:
            last_frame: the frame that is sent to all ranks. Each peer closes its connection after
                it has read this frame, so `on_end` is no longer called.
            linger: the maximum number of seconds to wait until all data has been sent.
        """
        self._leaving = True
        self.broadcast(last_frame)
        self._close_by = time.monotonic() + linger
        self._wake()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(linger + 1.0)

    def close_descriptors(self) -> None:
        """Closes only the file descriptors. A forked child calls this.

        Without this, the copies in the child would keep the connections open after the parent has
        died.
        """
        sockets = (connection.sock for connection in self._by_rank.values())
        for sock in (self._wake_receiver, self._wake_sender, *sockets):
            sock.close()

    def _wake(self) -> None:
        try:
            self._wake_sender.send(b"!")
        except OSError:  # the buffer is full, so the thread will wake up; or the thread has ended
            pass

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._wake_receiver, selectors.EVENT_READ)
            for rank, connection in self._by_rank.items():
                selector.register(connection.sock, selectors.EVENT_READ, rank)
            last = next_watch = time.monotonic()
            poll_seconds = min(_POLL_SECONDS, self._interval)
            # If only one connection is readable, this loop must not iterate over all connections,
            # because there may be thousands of them.
            while self._by_rank and not self._closed():
                while self._unsent:
                    if unsent := self._by_rank.get(rank := self._unsent.pop()):
                        both = selectors.EVENT_READ | selectors.EVENT_WRITE
                        selector.modify(unsent.sock, both, rank)
                events = selector.select(poll_seconds)
                now = time.monotonic()
                self._handle(selector, events, now)
                # If this process itself was suspended, it could not receive data. The silence of
                # its peers then proves nothing, so their timeouts start again.
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
        """Shuts down the connections without unsent data; returns whether the linger time is over.

        The result is False until `close` is called.
        """
        if self._close_by is None:
            return False
        for connection in self._by_rank.values():
            with connection.lock:
                if not connection.out and not connection.shut:
                    connection.shut = True
                    try:
                        connection.sock.shutdown(socket.SHUT_WR)
                    except OSError:  # the peer has already closed the connection
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
        """Reads the available data; if the connection is unusable, returns the reason."""
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
            elif now - connection.last_sent >= self._interval:  # other data replaces a heartbeat
                self.send(rank, _BEAT)
        self._handler.on_tick(now)

    def _end(self, selector: selectors.BaseSelector, rank: int) -> None:
        connection = self._by_rank[rank]
        selector.unregister(connection.sock)
        # Create a new dict, because other threads may be iterating over the old one.
        self._by_rank = {other: kept for other, kept in self._by_rank.items() if other != rank}
        connection.sock.close()


def _call(callback: Callable[[], object]) -> None:
    try:
        callback()
    except Exception:  # an error must not end the thread of the connections
        traceback.print_exc()


_alive: weakref.WeakSet[Connections] = weakref.WeakSet()


def _after_fork() -> None:
    for connections in list(_alive):
        connections.close_descriptors()


os.register_at_fork(after_in_child=_after_fork)
