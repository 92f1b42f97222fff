"""Connects a rank to all other ranks of its group.

The rank opens the connections to the lower ranks, and accepts connections from the higher ranks.
"""

import contextlib
import selectors
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from tfdist._src.cluster.auth.identity import Identity, disagreement
from tfdist._src.cluster.cluster_spec import Topology
from tfdist._src.cluster.mesh.subgroups import Subgroup
from tfdist._src.cluster.net.framing import WireError
from tfdist._src.cluster.net.sockets import close_on_fork, why_unreachable
from tfdist._src.cluster.net.tls import Tls, in_the_clear
from tfdist._src.cluster.net.wait_messages import Announce, WaitMessages, named
from tfdist._src.cluster.rendezvous.acceptor import Acceptor
from tfdist._src.cluster.rendezvous.connector import Connector, Target
from tfdist._src.cluster.session.session import Report
from tfdist._src.options import Options

CONTROL = "control"
DATA = "data"

_TICK_SECONDS = 0.2
_CHECK_SECONDS = 0.5
_EXPLAIN_SECONDS = 5.0
"""The maximum difference between the deadlines of a group's ranks."""

_Key = tuple[int, str]
"""The peer's rank in the group, and the type of the connection."""


class FullMeshConnector:
    """Opens the connections between this rank and the other ranks of its group.

    Args:
        topology: all workers of the session.
        group: the group of this process.
        listeners: non-blocking sockets that listen at the address of this rank. The caller must
            close them.
        options: the job's options. `start_timeout` and `secret` are used.
        tls: the TLS contexts for the handshakes; None if the job does not use TLS.
        announce: called with each message about a missing worker or a rejected connection.
    """

    def __init__(
        self,
        topology: Topology,
        group: Subgroup,
        listeners: Sequence[socket.socket],
        options: Options,
        tls: Tls | None,
        announce: Announce,
    ) -> None:
        self._topology = topology
        self._group = group
        self._deadline = time.monotonic() + options.start_timeout
        self._subject = f"mesh {group.identity}"
        self._progress = WaitMessages(topology.me, options.start_timeout, announce)
        self._mine = Identity.of(topology, self._subject)
        self._changed = threading.Condition()  # guards the next three attributes, and `_error`
        self._sockets: dict[_Key, socket.socket] = {}
        self._attempts: dict[_Key, int] = {}
        self._missing = {
            (rank, kind): "no attempt was received" if rank > group.rank else "not dialed yet"
            for rank in range(group.size)
            if rank != group.rank
            for kind in self._kinds(rank)
        }
        self._error: Exception | None = None
        self._wake_receiver, self._wake_sender = socket.socketpair()
        close_on_fork(self._wake_receiver)
        close_on_fork(self._wake_sender)
        self._expected = {
            self._purpose(rank, group.rank, kind): (rank, kind)
            for rank, kind in self._missing
            if rank > group.rank
        }
        self._selector = selectors.DefaultSelector()
        self._acceptor = Acceptor(
            self._selector,
            self._mine,
            options.secret,
            tls,
            2 * group.size,
            self._screen,
            self._accepted,
            announce,
        )
        self._connector = Connector(self._selector, options.secret, tls, self._wake)
        self._stopped = False
        self._thread = threading.Thread(
            target=self._run, args=(listeners,), name="tfdist-mesh", daemon=True
        )

    def start(self) -> None:
        """Starts the thread that opens and accepts the connections.

        The constructor does not start the thread, so that the caller can call `close` if starting
        the thread fails.
        """
        # Each rank first connects to the next lower rank. Otherwise, all ranks would connect to the
        # same rank at the same time.
        own = self._group.rank
        self._connector.start(
            [
                self._target(own - 1 - i, kind)
                for i in range(own)
                for kind in self._kinds(own - 1 - i)
            ]
        )
        self._thread.start()

    def wait(self, seconds: float, check: Callable[[], None]) -> None:
        """Waits until all connections are open, a connection has failed, or the time is over.

        Args:
            seconds: the maximum number of seconds to wait.
            check: called about twice a second. An error that it raises ends the wait.
        """
        end = min(self._deadline, time.monotonic() + seconds)
        while True:
            with self._changed:
                left = end - time.monotonic()
                if not self._missing or self._error is not None or left <= 0:
                    return
                self._changed.wait(min(left, _CHECK_SECONDS))
                missing = list(self._missing)
            check()
            if missing:
                self._progress.report(partial(self._describe, missing))

    def _describe(self, missing: Sequence[_Key]) -> str:
        ranks = sorted({self._group.members[rank] for rank, _ in missing})
        return f"connections with {named([self._topology.workers[rank] for rank in ranks])}"

    def status(self, most: int) -> Report:
        """Returns a report about the connections that this rank does not have yet.

        Args:
            most: the maximum number of connections to describe. They are described only if the
                deadline is near.

        Returns:
            A dict. `"missing"` is the number of peers with missing connections. `"some"` lists
            missing connections as [dialer, listener, reason], with the ranks of the session.
            `"late"` is True after the deadline.

        Raises:
            Exception: a connection cannot be opened, and retrying would not help.
        """
        members = self._group.members
        me = members[self._group.rank]
        left = self._deadline - time.monotonic()
        with self._changed:
            if self._error is not None:
                raise self._error
            ranks = {rank for rank, _ in self._missing}
            some: dict[int, list[object]] = {}
            for (rank, _), why in self._missing.items() if left < _EXPLAIN_SECONDS else ():
                if rank not in some and len(some) < most:
                    ends = [members[rank], me] if rank > self._group.rank else [me, members[rank]]
                    some[rank] = [*ends, why]
        return {"missing": len(ranks), "some": list(some.values()), "late": left <= 0}

    def finish(self) -> dict[_Key, socket.socket]:
        """Stops the thread and returns the connections.

        This may be called only when all ranks of the group have all of their connections.

        Returns:
            The connections as non-blocking sockets, by the peer's rank and the type of connection.
        """
        self._stop()
        for sock in self._sockets.values():
            sock.setblocking(False)
        return self._sockets

    def close(self) -> None:
        """Stops the thread and closes all connections."""
        self._stop()
        for sock in self._sockets.values():
            sock.close()

    def _stop(self) -> None:
        self._stopped = True
        self._wake()
        if self._thread.ident is not None:
            self._thread.join()
        self._connector.close()
        self._acceptor.close()
        self._selector.close()
        self._wake_receiver.close()
        self._wake_sender.close()

    def _wake(self) -> None:
        with contextlib.suppress(OSError):  # the buffer is full, or the socket is closed
            self._wake_sender.send(b"!", socket.MSG_DONTWAIT)

    def _kinds(self, rank: int) -> tuple[str, ...]:
        colocated = self._group.hosts[rank] == self._group.hosts[self._group.rank]
        return (CONTROL,) if colocated else (CONTROL, DATA)

    def _purpose(self, dialer: int, listener: int, kind: str) -> str:
        return f"{self._subject} {kind} {dialer}>{listener}"

    def _run(self, listeners: Sequence[socket.socket]) -> None:
        """Runs in a separate thread; accepts and opens connections until `_stop` is called."""
        next_tick = 0.0
        try:
            for sock in listeners:
                accept = partial(self._acceptor.accept, sock)
                self._selector.register(sock, selectors.EVENT_READ, accept)
            woken = partial(self._wake_receiver.recv, 4096)
            self._selector.register(self._wake_receiver, selectors.EVENT_READ, woken)
            while not self._stopped:
                self._connector.begin_due()
                for key, _ in self._selector.select(self._connector.seconds_left(_TICK_SECONDS)):
                    key.data()
                if (now := time.monotonic()) >= next_tick:
                    next_tick = now + _TICK_SECONDS
                    self._connector.tick()
                    self._acceptor.tick()
        except Exception as error:
            self._fail(error)

    def _screen(self, hello: Identity) -> None:
        """Raises WireError if this rank does not expect a connection from the peer."""
        if error := disagreement(self._topology, self._mine, hello):
            raise WireError(str(error))
        key = self._expected.get(hello.purpose)
        if key is None or hello.rank != self._group.members[key[0]]:
            raise WireError(f"{hello} connected for {hello.purpose!r}, which is not expected here")

    def _accepted(self, sock: socket.socket, hello: Identity) -> None:
        # A peer connects again if its previous attempt has timed out or was interrupted. The
        # handshake of the previous attempt may nevertheless complete here, even after the handshake
        # of the new attempt. So only the connection of the latest attempt is kept.
        key = self._expected[hello.purpose]
        with self._changed:
            if hello.attempt < self._attempts.get(key, 0):
                sock.close()
                return
            self._attempts[key] = hello.attempt
        self._connected(key, sock)

    def _target(self, rank: int, kind: str) -> Target:
        key = (rank, kind)
        return Target(
            name=str(self._topology.workers[self._group.members[rank]]),
            address=self._group.addresses[rank],
            ports=self._group.ports[rank],
            hello=replace(self._mine, purpose=self._purpose(self._group.rank, rank, kind)),
            screen=partial(self._screen_listener, rank),
            on_opened=partial(self._opened, key),
            on_connected=partial(self._connected, key),
            on_failed=partial(self._attempt_failed, key),
        )

    def _screen_listener(self, rank: int, hello: Identity) -> None:
        if hello.rank != self._group.members[rank] or hello.purpose != self._subject:
            raise WireError(f"{hello} answers there")

    def _opened(self, key: _Key) -> None:
        with self._changed:
            self._missing[key] = "it has accepted a connection, but has not answered yet"

    def _connected(self, key: _Key, sock: socket.socket) -> None:
        # The native core cannot take over the TLS state of Python's socket. If the job uses TLS,
        # the core performs its own TLS handshake later.
        sock = close_on_fork(in_the_clear(sock))
        with self._changed:
            if replaced := self._sockets.get(key):
                replaced.close()
            self._sockets[key] = sock
            self._missing.pop(key, None)
            if not self._missing:
                self._changed.notify_all()

    def _attempt_failed(self, key: _Key, error: Exception) -> None:
        """Records why an attempt has failed; fails the whole group if retrying would not help."""
        if isinstance(error, (OSError, WireError)):
            with self._changed:
                reason = why_unreachable(error) if isinstance(error, OSError) else str(error)
                self._missing[key] = reason
        else:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        with self._changed:
            self._error = error
            self._changed.notify_all()
