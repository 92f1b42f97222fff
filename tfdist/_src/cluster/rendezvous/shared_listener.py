"""Listens at this process's address while a job runs, for several purposes at the same time."""

import contextlib
import selectors
import socket
import threading
import time
import traceback
from collections.abc import Callable, Collection
from functools import partial
from typing import Any, Protocol

from tfdist._src.cluster.auth.identity import Identity
from tfdist._src.cluster.cluster_spec import Topology
from tfdist._src.cluster.net.framing import WireError
from tfdist._src.cluster.net.listener import claim
from tfdist._src.cluster.net.sockets import close_on_fork
from tfdist._src.cluster.net.tls import Tls
from tfdist._src.cluster.net.wait_messages import Announce
from tfdist._src.cluster.rendezvous.acceptor import Acceptor
from tfdist._src.cluster.session.session import Session
from tfdist._src.options import Options

_BACKLOG = 64
_STRANGERS = 16
_TICK_SECONDS = 0.2
_ATTENTIVE_SECONDS = 30.0
"""The time for which the thread checks deadlines after an event, before it sleeps."""
_STOP_SECONDS = 2.0
_MAX_ERRORS = 10
"""The maximum number of unexpected errors printed in one period of listening."""


class Service(Protocol):
    """Serves the connections of one purpose during one period of listening, in its thread."""

    @property
    def identity(self) -> Identity:
        """The identity that this process presents to the peers."""

    @property
    def is_busy(self) -> bool:
        """Whether `tick` must be called regularly, even without an event."""

    def admit(self, sock: socket.socket, hello: Identity) -> None:
        """Receives an authenticated connection, non-blocking."""

    def tick(self) -> None:
        """Does any work that is due; called after every wait."""

    def close(self) -> None:
        """Ends the period."""


Wake = Callable[[], object]
OpenService = Callable[[selectors.BaseSelector, Wake], Service]
"""Opens a service, given the selector of the period and a function that wakes its thread."""


class SharedListener:
    """A listener at this process's address; its thread sleeps while there are no connections.

    Args:
        topology: this process's cluster.
        options: `secret` and the TLS options are used.
        what: the consequence if it cannot listen, for a message.
        announce: called with that message, and with lines about rejected connections.
    """

    def __init__(self, topology: Topology, options: Options, what: str, announce: Announce) -> None:
        self._topology = topology
        self._options = options
        self._what = what
        self._announce = announce
        self._services: dict[str, OpenService] = {}
        self._expected = 0
        self._thread: threading.Thread | None = None
        self._wake_sender: socket.socket | None = None
        self._stopped = threading.Event()
        self._lock = threading.RLock()

    def serve(self, purpose: str, open_service: OpenService, expected: int) -> None:
        """Opens a service for a purpose, in place of an earlier one.

        Args:
            purpose: the purpose of the connections.
            open_service: called at the beginning of each period of listening.
            expected: the maximum number of workers that connect to it at the same time.
        """
        with self._lock:
            listens = self._thread is not None
            self.pause()
            self._services[purpose] = open_service
            self._expected = max(self._expected, expected)
            if listens:
                self.resume()

    def end(self, purpose: str) -> None:
        """Closes the service for a purpose; stops listening if none is left."""
        with self._lock:
            listens = self._thread is not None
            self.pause()
            self._services.pop(purpose, None)
            if listens and self._services:
                self.resume()

    def serves(self, purpose: str) -> bool:
        """Whether there is a service for a purpose."""
        return purpose in self._services

    def resume(self) -> None:
        """Starts listening. If that is impossible, a message says so, and the job continues."""
        with self._lock:
            if self._thread is not None and not self._thread.is_alive():
                self.pause()  # an error has ended the thread
            if self._thread is None and self._services:
                self._resume()

    def _resume(self) -> None:
        me = self._topology.me
        listeners: list[socket.socket] = []
        try:
            tls = Tls.load(self._options)
            listeners = [close_on_fork(sock) for sock in claim(me.address, name=str(me))]
            for sock in listeners:
                sock.listen(_BACKLOG)
                sock.setblocking(False)
            wake_receiver, wake_sender = map(close_on_fork, socket.socketpair())
        except (OSError, ValueError) as error:
            for sock in listeners:
                sock.close()
            self._announce(f"{self._what}: {error}")
            return
        wake_receiver.setblocking(False)
        wake_sender.setblocking(False)
        self._wake_sender = wake_sender
        self._stopped = threading.Event()
        self._thread = threading.Thread(
            target=self._serve,
            args=(listeners, wake_receiver, tls, self._stopped),
            name="tfdist-listener",
            daemon=True,
        )
        self._thread.start()

    def pause(self) -> None:
        """Stops listening, and drops the connections that no service keeps."""
        with self._lock:
            thread, self._thread = self._thread, None
            if thread is None:
                return
            self._stopped.set()
            self.wake()
            if thread is not threading.current_thread():
                thread.join(_STOP_SECONDS)
            if self._wake_sender:
                self._wake_sender.close()

    def wake(self) -> None:
        """Wakes the thread to call the services; callable from any thread."""
        with contextlib.suppress(OSError):  # the buffer is full, or the socket is closed
            if self._wake_sender:
                self._wake_sender.send(b"!")

    def _serve(
        self,
        listeners: list[socket.socket],
        wake_receiver: socket.socket,
        tls: Tls | None,
        stopped: threading.Event,
    ) -> None:
        try:
            with selectors.DefaultSelector() as selector, contextlib.ExitStack() as stack:
                services: dict[str, Service] = {}
                for purpose, open_service in self._services.items():
                    services[purpose] = service = open_service(selector, self.wake)
                    stack.callback(service.close)
                acceptor = self._acceptor(selector, services, tls)
                stack.callback(acceptor.close)
                for sock in listeners:
                    selector.register(sock, selectors.EVENT_READ, partial(acceptor.accept, sock))
                woken = partial(wake_receiver.recv, 4096)
                selector.register(wake_receiver, selectors.EVENT_READ, woken)
                kept = {*listeners, wake_receiver}
                _loop(selector, acceptor, list(services.values()), stopped, kept)
        except Exception as error:  # the job continues
            self._announce(f"{self._what} any longer: {error!r}")
        finally:
            for sock in (*listeners, wake_receiver):
                sock.close()

    def _acceptor(
        self, selector: selectors.BaseSelector, services: dict[str, Service], tls: Tls | None
    ) -> Acceptor:
        def screen(hello: Identity) -> None:
            if hello.purpose not in services:
                raise WireError(
                    f"{hello} connected for {hello.purpose!r}, but this job is running already"
                )

        def admit(sock: socket.socket, hello: Identity) -> None:
            try:
                services[hello.purpose].admit(sock, hello)
            except BaseException:
                _drop(selector, sock)
                raise

        return Acceptor(
            selector,
            Identity.of(self._topology),
            self._options.secret,
            tls,
            self._expected,
            screen,
            admit,
            self._announce,
            _STRANGERS,
            lambda hello: services[hello.purpose].identity,
            hang_ups=False,  # members hang up once they have their answer
        )


def shared_listener_of(
    session: Session, options: Options, what: str, announce: Announce
) -> SharedListener:
    """Returns the listener at a session's address, or a new one, which does not listen yet.

    Args:
        session: the session.
        options: see `SharedListener`.
        what: see `SharedListener`.
        announce: see `SharedListener`.
    """
    tenant = session.address.tenant
    if isinstance(tenant, SharedListener):
        return tenant
    return SharedListener(session.topology, options, what, announce)


def _loop(
    selector: selectors.BaseSelector,
    acceptor: Acceptor,
    services: list[Service],
    stopped: threading.Event,
    kept: Collection[socket.socket],
) -> None:
    """Serves until it is stopped; an unexpected error closes at most one connection.

    Args:
        selector: contains the connections, with a function to call as data.
        acceptor: accepts the connections.
        services: serve the accepted connections.
        stopped: set to end the loop.
        kept: sockets that are never closed here.
    """
    errors = 0

    def survives(call: Callable[[], object]) -> bool:
        nonlocal errors
        try:
            call()
        except Exception:
            errors += 1
            if errors <= _MAX_ERRORS:
                traceback.print_exc()
            return False
        return True

    attentive_until = 0.0
    while not stopped.is_set():
        attentive = time.monotonic() < attentive_until or any(
            service.is_busy for service in services
        )
        events = selector.select(_TICK_SECONDS if attentive else None)
        if events:
            attentive_until = time.monotonic() + _ATTENTIVE_SECONDS
        for key, _ in events:
            if not survives(key.data) and key.fileobj not in kept:
                _drop(selector, key.fileobj)
        for service in services:
            survives(service.tick)
        survives(acceptor.tick)


def _drop(selector: selectors.BaseSelector, sock: Any) -> None:
    with contextlib.suppress(KeyError, ValueError):  # already dropped
        selector.unregister(sock)
    sock.close()
