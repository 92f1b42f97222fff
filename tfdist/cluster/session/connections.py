"""Keeps the control connections: one thread reads, writes and watches over all of them."""

from __future__ import annotations

import os
import selectors
import socket
import threading
import time
import weakref
from collections.abc import Mapping
from typing import Protocol

from tfdist.cluster.net.framing import FRAME_LIMIT, Decoder, Header, WireError, encode

_BEAT = encode({"kind": "beat"})
_BEAT_SECONDS = 5.0
_SLICE = 0.5
_CHUNK = 256 * 1024


class Handler(Protocol):
    """What happens on the connections; all of it called from the thread of `Connections`."""

    def on_frame(self, rank: int, header: Header, payload: bytes) -> None:
        """A frame came. KeyError, TypeError and ValueError mean that it was malformed."""

    def on_end(self, rank: int, reason: str) -> None:
        """A connection broke; called once, and not for one that was dropped or closed."""

    def on_tick(self, now: float) -> None:
        """Called about twice a second with `time.monotonic()`."""


class _Link:
    """One connection with what waits to be sent over it."""

    def __init__(self, sock: socket.socket, now: float) -> None:
        self.sock = sock
        self.decoder = Decoder(FRAME_LIMIT)
        self.lock = threading.Lock()  # guards `out` and the socket
        self.out = bytearray()
        self.heard = now
        self.dropped = False
        self.shut = False

    def send(self, data: bytes) -> None:
        """Sends what goes without waiting, and keeps the rest."""
        with self.lock:
            if self.shut:
                return
            self.out += data
            try:
                while self.out:
                    del self.out[: self.sock.send(self.out[:_CHUNK])]
            except BlockingIOError:
                pass
            except OSError:  # reading will say what is the matter
                self.out.clear()


class Connections:
    """The connections to other ranks.

    Args:
        sockets: a connected socket for each rank.
        handler: is told what happens.
        silence: seconds without a sign of life after which a connection counts as broken.
    """

    def __init__(
        self, sockets: Mapping[int, socket.socket], handler: Handler, silence: float
    ) -> None:
        now = time.monotonic()
        self._links = {rank: _Link(sock, now) for rank, sock in sockets.items()}
        self._handler = handler
        self._silence = silence
        self._beat = min(_BEAT_SECONDS, silence / 4)
        self._leaving = False
        self._close_by: float | None = None
        self._bell, self._ringer = socket.socketpair()
        for sock in (self._bell, self._ringer, *sockets.values()):
            sock.setblocking(False)
        self._thread = threading.Thread(target=self._run, name="tfdist-links", daemon=True)
        _alive.add(self)

    def start(self) -> None:
        """Begins to read; apart from the constructor so that the handler can be made ready."""
        if self._links:
            self._thread.start()
        else:
            self.forget()

    def send(self, rank: int, frame: bytes) -> None:
        """Sends a frame to a rank, from any thread and without waiting."""
        if link := self._links.get(rank):
            link.send(frame)
            if link.out:
                self._ring()

    def broadcast(self, frame: bytes) -> None:
        """Sends a frame to every rank that is still connected."""
        for rank in list(self._links):
            self.send(rank, frame)

    def drop(self, rank: int) -> None:
        """Closes a connection without a word; only from within the handler."""
        self._links[rank].dropped = True

    def close(self, farewell: bytes, linger: float) -> None:
        """Sends what waits and a last frame, closes all connections and ends the thread.

        Args:
            farewell: the last frame. Who has read it closes the connection, so that from now on
                an end is no news.
            linger: seconds that this may take.
        """
        self._leaving = True
        self.broadcast(farewell)
        self._close_by = time.monotonic() + linger
        self._ring()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(linger + 1.0)

    def forget(self) -> None:
        """Closes this process's descriptors and nothing else; in a forked child, its copies.

        A child's copies would keep the connections open after this process has died.
        """
        for sock in (self._bell, self._ringer, *(link.sock for link in self._links.values())):
            sock.close()

    def _ring(self) -> None:
        try:
            self._ringer.send(b"!")
        except OSError:  # it rings already, or the thread has ended
            pass

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._bell, selectors.EVENT_READ)
            for rank, link in self._links.items():
                selector.register(link.sock, selectors.EVENT_READ, rank)
            last = next_beat = time.monotonic()
            while self._links and not self._closed():
                for rank, link in self._links.items():
                    wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if link.out else 0)
                    selector.modify(link.sock, wanted, rank)
                events = selector.select(min(_SLICE, self._beat))
                now = time.monotonic()
                self._handle(selector, events, now)
                if now - last > self._silence / 2:  # this process was stopped: it cannot judge
                    for link in self._links.values():
                        link.heard = now
                last = now
                if not self._leaving:
                    self._watch(selector, now)
                if now >= next_beat:
                    next_beat = now + self._beat
                    self.broadcast(_BEAT)
            for rank in list(self._links):
                self._end(selector, rank)
        self._bell.close()
        self._ringer.close()

    def _closed(self) -> bool:
        """Whether closing is over; on the way there, ends each stream once all of it is sent."""
        if self._close_by is None:
            return False
        for link in self._links.values():
            with link.lock:
                if not link.out and not link.shut:
                    link.shut = True
                    try:
                        link.sock.shutdown(socket.SHUT_WR)
                    except OSError:  # the other end was faster
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
                self._bell.recv(4096)
                continue
            link = self._links[rank]
            if event & selectors.EVENT_WRITE:
                link.send(b"")
            if event & selectors.EVENT_READ:
                link.heard = now
                reason = self._read(rank, link)
                if reason or link.dropped:
                    self._end(selector, rank)
                if reason and not link.dropped and not self._leaving:
                    self._handler.on_end(rank, reason)

    def _read(self, rank: int, link: _Link) -> str | None:
        """Reads what has come; returns why the connection is of no more use."""
        try:
            with link.lock:
                data = link.sock.recv(_CHUNK)
        except BlockingIOError:
            return None
        except OSError as error:
            return f"connection broken ({error.strerror or error})"
        if not data:
            return "connection closed"
        try:
            for header, payload in link.decoder.feed(data):
                if not self._leaving and not link.dropped and header["kind"] != "beat":
                    self._handler.on_frame(rank, header, payload)
        except (WireError, KeyError, TypeError, ValueError) as error:
            return f"it sent what tfdist does not understand ({error!r})"
        return None

    def _watch(self, selector: selectors.BaseSelector, now: float) -> None:
        for rank, link in list(self._links.items()):
            if now - link.heard > self._silence:
                self._handler.on_end(rank, f"no sign of life for {self._silence:g} s")
                self._end(selector, rank)
        self._handler.on_tick(now)

    def _end(self, selector: selectors.BaseSelector, rank: int) -> None:
        link = self._links[rank]
        selector.unregister(link.sock)
        # A copy, because other threads go through the links meanwhile.
        self._links = {other: kept for other, kept in self._links.items() if other != rank}
        link.sock.close()


_alive: weakref.WeakSet[Connections] = weakref.WeakSet()


def _after_fork() -> None:
    for links in list(_alive):
        links.forget()


os.register_at_fork(after_in_child=_after_fork)
