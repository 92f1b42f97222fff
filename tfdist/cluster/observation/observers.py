"""Lets observers ask rank 0 how the job goes, at the address at which the workers have met."""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
import time
from functools import partial

from tfdist.cluster.auth.trust import is_closed
from tfdist.cluster.net.bind_address import claim
from tfdist.cluster.net.descriptors import close_on_fork
from tfdist.cluster.net.tls import Tls
from tfdist.cluster.net.wait_messages import Announce, say
from tfdist.cluster.observation.answering import Answering
from tfdist.cluster.session.session import Session
from tfdist.options import Options

_BACKLOG = 16
_TICK_SECONDS = 0.2
_ATTENTIVE_SECONDS = 30.0
"""For how long after an event there may be deadlines; after that, the thread sleeps."""
_STOP_SECONDS = 2.0


def observe(session: Session, options: Options, announce: Announce = say) -> None:
    """Has rank 0 answer observers at its address from now on, while the workers do not need it.

    Calling it again has no effect, nor does it on other ranks. Jobs without a secret that others
    than this host's processes can reach are not observed: strangers would get answers.

    Args:
        session: the session.
        options: `secret` and the TLS options authenticate observers as they do workers.
        announce: called with lines about rejected connections; writes to stderr by default.

    Example:
        >>> from tfdist.cluster import Topology, meet
        >>> observe(meet(Topology(), Options()), Options())  # alone, there is nobody to ask
    """
    if session.rank != 0 or session.size == 1 or session.address.is_let:
        return
    if is_closed(session.topology, options):
        session.address.let(Observers(session, options, announce))


class Observers:
    """The observers of a job, served by a thread of rank 0 that sleeps while there are none.

    Args:
        session: the session of rank 0.
        options: `secret` and the TLS options are used.
        announce: called with lines about rejected connections.
    """

    def __init__(self, session: Session, options: Options, announce: Announce) -> None:
        self._session = session
        self._options = options
        self._announce = announce
        self._thread: threading.Thread | None = None
        self._wake_sender: socket.socket | None = None
        self._stopped = threading.Event()

    def resume(self) -> None:
        """Starts to listen. If that is impossible, a line says so, and the job goes on."""
        me = self._session.topology.me
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
            self._announce(f"tfdist: `tfdist doctor --job` cannot ask this job: {error}")
            return
        wake_receiver.setblocking(False)
        wake_sender.setblocking(False)
        self._wake_sender = wake_sender
        self._stopped = threading.Event()
        self._thread = threading.Thread(
            target=self._serve,
            args=(listeners, wake_receiver, tls, self._stopped),
            name="tfdist-observers",
            daemon=True,
        )
        self._thread.start()

    def pause(self) -> None:
        """Stops listening, and drops the observers that have no answer yet."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        self._stopped.set()
        self._wake()
        thread.join(_STOP_SECONDS)
        if self._wake_sender:
            self._wake_sender.close()

    def _wake(self) -> None:
        with contextlib.suppress(OSError):  # it is full, or closed after the end
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
            with selectors.DefaultSelector() as selector:
                answering = Answering(
                    selector, self._session, self._options, tls, self._wake, self._announce
                )
                with contextlib.closing(answering):
                    for sock in listeners:
                        accept = partial(answering.accept, sock)
                        selector.register(sock, selectors.EVENT_READ, accept)
                    woken = partial(wake_receiver.recv, 4096)
                    selector.register(wake_receiver, selectors.EVENT_READ, woken)
                    _loop(selector, answering, stopped)
        except Exception as error:  # the job goes on
            self._announce(f"tfdist: `tfdist doctor --job` can no longer ask this job: {error!r}")
        finally:
            for sock in (*listeners, wake_receiver):
                sock.close()


def _loop(selector: selectors.BaseSelector, answering: Answering, stopped: threading.Event) -> None:
    attentive_until = 0.0
    while not stopped.is_set():
        attentive = time.monotonic() < attentive_until
        events = selector.select(_TICK_SECONDS if attentive else None)
        if events:
            attentive_until = time.monotonic() + _ATTENTIVE_SECONDS
        for key, _ in events:
            key.data()
        answering.tick()
