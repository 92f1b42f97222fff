"""Listens at the address of this process while a job runs; several services share the address."""

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
    """Serves all connections with one purpose, in the thread of the listener.

    The listener creates a new service each time that it starts to listen, and closes the service
    when it stops.
    """

    @property
    def identity(self) -> Identity:
        """The identity that this process sends to the peers of this service."""

    @property
    def is_busy(self) -> bool:
        """Whether `tick` must be called regularly, even if no connection is ready."""

    def admit(self, sock: socket.socket, hello: Identity) -> None:
        """Takes over a new connection, which is authenticated and non-blocking."""

    def tick(self) -> None:
        """Does the work that is due at this time; called after every wait."""

    def close(self) -> None:
        """Closes all connections of the service."""


Wake = Callable[[], object]
OpenService = Callable[[selectors.BaseSelector, Wake], Service]
"""Opens a service, given the selector of the period and a function that wakes its thread."""


class SharedListener:
    """Listens at the address of this process, in a thread that sleeps without connections.

    Args:
        topology: the cluster of this process.
        options: the job's options. `secret` and the TLS options are used.
        what: the consequence for the user if this process cannot listen. The error message begins
            with this text.
        announce: called with that error message, and with each message about a rejected connection.
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
        """Registers the service for a purpose, and replaces an earlier service for this purpose.

        Args:
            purpose: the purpose of the connections (see `Identity.purpose`).
            open_service: creates the service; called each time that this object starts to listen.
            expected: the maximum number of workers that connect to the service at the same time.
        """
        with self._lock:
            listens = self._thread is not None
            self.pause()
            self._services[purpose] = open_service
            self._expected = max(self._expected, expected)
            if listens:
                self.resume()

    def end(self, purpose: str) -> None:
        """Removes the service for a purpose; stops listening if no other service is left."""
        with self._lock:
            listens = self._thread is not None
            self.pause()
            self._services.pop(purpose, None)
            if listens and self._services:
                self.resume()

    def serves(self, purpose: str) -> bool:
        """Whether a service is registered for a purpose."""
        return purpose in self._services

    def resume(self) -> None:
        """Starts to listen if any service is registered.

        If this process cannot listen, a message is printed, but no error is raised.
        """
        with self._lock:
            if self._thread is not None and not self._thread.is_alive():
                self.pause()  # the thread has ended because of an error
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
        """Stops listening, and closes the services and the unauthenticated connections."""
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
        """Makes the thread call `tick` of all services; can be called in any thread."""
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
        except Exception as error:  # the job can continue without the listener
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
            hang_ups=False,  # members may close a connection early, once they know the answer
        )


def shared_listener_of(
    session: Session, options: Options, what: str, announce: Announce
) -> SharedListener:
    """Returns the listener at the address of a session, or creates one.

    A new listener does not listen until `SharedListener.resume` is called.

    Args:
        session: the session of this process.
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
    """Runs the listener until `stopped` is set. An unexpected error closes only one connection.

    Args:
        selector: the selector of the thread. The data of each registered connection is the function
            to call when the connection is ready.
        acceptor: accepts and authenticates the connections.
        services: the services, which take over the accepted connections.
        stopped: the event that ends the loop.
        kept: the sockets that an error must not close: the listening sockets, and the socket that
            wakes the thread.
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
