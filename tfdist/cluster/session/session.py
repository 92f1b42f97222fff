"""The group while it runs: exchanges small byte strings, and notices when a worker is lost."""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections.abc import Callable, Mapping
from socket import socket

from tfdist.cluster.session import exit_reason
from tfdist.cluster.session.agent import Agent
from tfdist.cluster.session.coordinator import Coordinator
from tfdist.cluster.session.pending_exchanges import COLLECTIVE_TIMEOUT
from tfdist.cluster.session.state import SessionState
from tfdist.cluster.spec.topology import Topology
from tfdist.errors import PeerLostError, RendezvousError
from tfdist.options import Options

MOST_BYTES = 64 * 1024 * 1024
_GRACE_SECONDS = 5.0
_LINGER_SECONDS = 1.0


class Session:
    """The connections of this process to its group; `meet` makes it.

    A thread of its own watches over them: a worker that dies, or is silent for
    `options.heartbeat_timeout`, ends the session on every rank with the same message. A process
    that ends normally says goodbye by itself; one that ends by an uncaught exception says that it
    failed and why. A forked child must not use it.

    Args:
        topology: the group and this process's place in it.
        sockets: rank 0 has a connection to each other rank, the others have one to rank 0, a
            process alone has none.
        options: `collective_timeout`, `heartbeat_timeout` and `stall_warning` are used.

    Example:
        >>> session = Session(Topology(), {}, Options())
        >>> session.exchange("greeting", b"hello")
        [b'hello']
        >>> session.close()
    """

    def __init__(self, topology: Topology, sockets: Mapping[int, socket], options: Options) -> None:
        self.topology = topology
        self._options = options
        self._state = SessionState()
        self._turn = threading.Lock()  # one exchange at a time
        self._sequence = 0
        self._closing = threading.Lock()
        self._pid = os.getpid()
        silence = options.heartbeat_timeout
        self._role: Coordinator | Agent
        if topology.rank == 0:
            self._role = Coordinator(
                topology.workers, sockets, self._state, silence, options.stall_warning
            )
        else:
            self._role = Agent(topology.workers, sockets[0], self._state, silence)
        if sockets:
            exit_reason.watch()
            atexit.register(self._at_exit)

    @property
    def rank(self) -> int:
        """This process's position in the group."""
        return self.topology.rank

    @property
    def size(self) -> int:
        """The number of processes in the group."""
        return self.topology.size

    def exchange(
        self,
        tag: str,
        payload: bytes,
        timeout: float | None = None,
        *,
        variable: str = COLLECTIVE_TIMEOUT,
    ) -> list[bytes]:
        """Brings a small byte string from every rank to every rank.

        Every rank calls this in the same order with the same tags.

        Args:
            tag: what the exchange is for; compared between the ranks.
            payload: this rank's bytes; 64 MiB at most over all ranks.
            timeout: seconds to wait for the others; `options.collective_timeout` by default.
            variable: the environment variable that sets these seconds, for the error's remedy.

        Returns:
            The payloads in rank order.

        Raises:
            ProgramMismatchError: another rank called this with another tag.
            PeerLostError: a worker is lost, or has ended.
            RendezvousError: a worker did not join in time. As after every error, the session is
                then of no more use, on any rank.
            ValueError: the payload is too long.

        Example:
            >>> session.exchange("batch size", b"32")  # doctest: +SKIP
            [b'32', b'32']
        """
        if len(payload) * self.size > MOST_BYTES:
            raise ValueError(
                f"exchange() is for small payloads, {MOST_BYTES // self.size} bytes at most on "
                f"each of {self.size} workers. Received: {len(payload)} bytes. Send less."
            )
        seconds = self._options.collective_timeout if timeout is None else timeout
        with self._turn:
            self._state.check()
            sequence = self._sequence
            self._sequence += 1
            self._state.expect(sequence)
            self._role.join(sequence, tag, bytes(payload), seconds, variable)
            # Rank 0 keeps the time and names who is missing; this is only the second line.
            late = RendezvousError(
                f"exchange {tag!r} waited {seconds:g} s in vain, and {self._chief()} did not say "
                f"for whom. See what it does."
            )
            deadline = time.monotonic() + seconds + _GRACE_SECONDS
            return self._state.result(sequence, deadline, late)

    def notify(self, key: str, text: str = "") -> None:
        """Posts a notice to every rank, without waiting; only on rank 0.

        Args:
            key: what the notice is about.
            text: what it says.

        Raises:
            ValueError: this is not rank 0.

        Example:
            >>> session.notify("checkpoint written")  # doctest: +SKIP
        """
        self._role.notify(key, text)

    def wait_notified(self, key: str, count: int, timeout: float | None = None) -> list[str]:
        """Waits until rank 0 has posted so many notices with this key since the start.

        Args:
            key: what the notices are about.
            count: how many, all that came so far included.
            timeout: seconds to wait; `options.collective_timeout` by default.

        Returns:
            The texts of all notices with this key so far, in order.

        Raises:
            PeerLostError: a worker is lost, or rank 0 has ended.
            RendezvousError: rank 0 did not post in time.

        Example:
            >>> session.wait_notified("checkpoint written", 1)  # doctest: +SKIP
        """
        seconds = self._options.collective_timeout if timeout is None else timeout
        late = RendezvousError(
            f"waited {seconds:g} s in vain for notice {count} of {key!r} from {self._chief()}. "
            f"See what it does; where it is only slow, set TFDIST_COLLECTIVE_TIMEOUT to wait "
            f"longer."
        )
        slow = (
            f"tfdist: rank {self.rank} waits for {self._chief()} to post {key!r}; it fails after "
            f"{seconds:g} s"
        )
        now = time.monotonic()
        return self._state.notices(
            key, count, now + seconds, late, (now + self._options.stall_warning, slow)
        )

    def on_peer_lost(self, callback: Callable[[str], object]) -> None:
        """Registers what to do when a worker is lost.

        Args:
            callback: called once, with a line that names rank, worker, address and what happened.
                It runs in the thread that watches over the connections; at once and in this one
                where a worker is lost already.

        Example:
            >>> session.on_peer_lost(print)  # doctest: +SKIP
        """
        self._state.on_lost(callback)

    def on_peer_left(self, callback: Callable[[str], object]) -> None:
        """Registers what to do when a worker ends normally.

        Args:
            callback: called for each, with a line that names it, in the thread that watches over
                the connections; at once for those that have ended already.

        Example:
            >>> session.on_peer_left(print)  # doctest: +SKIP
        """
        self._state.on_left(callback)

    def close(self, failure: str | None = None) -> None:
        """Says goodbye and closes the connections; takes a second at most, and works once.

        Args:
            failure: why this worker fails, which ends the session on all others; None where it ends
                in good order.
        """
        self._close(failure)

    def _chief(self) -> str:
        return f"rank 0, {self.topology.chief}" if self.topology.workers else "this process"

    def _at_exit(self) -> None:
        self._close(exit_reason.failure())

    def _close(self, failure: str | None) -> None:
        if os.getpid() != self._pid or not self._closing.acquire(blocking=False):
            return
        atexit.unregister(self._at_exit)
        self._role.close(failure, _LINGER_SECONDS)
        self._state.fail(PeerLostError("This worker has closed its session."))
