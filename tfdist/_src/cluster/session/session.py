"""The running group: exchanges small byte strings and detects lost workers."""

import atexit
import json
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from socket import socket
from typing import Any

from tfdist._src.cluster.cluster_spec import Topology
from tfdist._src.cluster.session import exit_reason, shared_state
from tfdist._src.cluster.session.agent import Agent
from tfdist._src.cluster.session.connections import Gathering, LocalAddress, LocalReport, Presence
from tfdist._src.cluster.session.coordinator import Coordinator, Decision
from tfdist._src.cluster.session.exit_reason import describe
from tfdist._src.cluster.session.shared_state import Loss
from tfdist._src.options import Options, Variable
from tfdist.errors import ClusterError, PeerLostError, RendezvousError, TfdistError

MAX_BYTES = 64 * 1024 * 1024
_GRACE_SECONDS = 5.0
_LINGER_SECONDS = 1.0


class Session:
    """This process's connections to its group; created by `meet`.

    A background thread monitors them: if a worker dies, or is silent for
    `options.heartbeat_timeout`, the session fails on every rank with the same message. A process
    that exits says goodbye automatically, and reports the uncaught exception that terminated it,
    if any. A forked child must not use the session.

    Args:
        topology: the group and this process's rank.
        sockets: on rank 0, a connection to each other rank; on other ranks, one to rank 0; empty
            for a single process.
        options: `collective_timeout`, `heartbeat_timeout` and `stall_warning` are used.

    Attributes:
        report: this rank's report, which rank 0 may request.
        address: this rank's address, and its listener.

    Example:
        >>> session = Session(Topology(), {}, Options())
        >>> session.exchange("greeting", b"hello")
        [b'hello']
        >>> session.close()
    """

    def __init__(self, topology: Topology, sockets: Mapping[int, socket], options: Options) -> None:
        self.topology = topology
        self._options = options
        self._state = shared_state.SessionState()
        self.report = LocalReport()
        self.address = LocalAddress()
        self._exchange_lock = threading.Lock()  # one exchange at a time
        self._closing = threading.Lock()
        self._pid = os.getpid()
        limits = options.heartbeat_timeout, options.stall_warning
        self._role: Coordinator | Agent
        if topology.rank == 0:
            self._role = Coordinator(topology.workers, sockets, self._state, self.report, *limits)
        else:
            self._role = Agent(topology.workers, sockets[0], self._state, self.report, *limits)
        if sockets:
            exit_reason.watch()
            atexit.register(self._at_exit)

    @property
    def rank(self) -> int:
        """This process's rank in the group."""
        return self.topology.rank

    @property
    def size(self) -> int:
        """The number of processes in the group."""
        return self.topology.size

    @property
    def lost_ranks(self) -> list[int]:
        """The ranks that are known to be lost."""
        return sorted(self._state.lost_ranks)

    @property
    def silent_ranks(self) -> list[int]:
        """The lost ranks that have been silent for `options.heartbeat_timeout`."""
        return sorted(self._state.silent_ranks)

    @property
    def loss(self) -> Loss | None:
        """The loss of a worker that ended the session; None without one."""
        lost, silent = self.lost_ranks, self.silent_ranks
        if not lost or self.failure is None:
            return None
        return Loss(str(self.topology.workers[lost[0]]), self.failure, silent=lost[0] in silent)

    @property
    def chief_has_left(self) -> bool:
        """Whether rank 0 has left normally, and so posts no more notices."""
        return self._state.chief_has_left

    @property
    def awaited(self) -> list[shared_state.PendingWait]:
        """The exchange and the notice that threads of this process wait for, if any."""
        return [one for one in (self._state.awaited, self._state.awaited_notice) if one]

    def record_exchanges(self, recorder: shared_state.ExchangeRecorder) -> None:
        """Registers the recorder of exchanges, in place of an earlier one."""
        self._state.recorder = recorder

    def stalled(self, text: str) -> None:
        """Reports a long wait of this rank to the recorders of all other ranks."""
        self._role.stalled(f"{self.topology.me}: {text}")

    def check(self) -> None:
        """Raises the error that ended the session, if any.

        Raises:
            TfdistError: a worker is lost, or the session has failed or has been closed.
        """
        self._state.check()

    @property
    def failure(self) -> str | None:
        """The message of the error that ended the session, if any."""
        return self._state.failure

    def exchange(
        self,
        tag: str,
        payload: bytes,
        timeout: float | None = None,
        *,
        variable: str = Variable.COLLECTIVE_TIMEOUT,
    ) -> list[bytes]:
        """Gathers a small byte string from every rank on every rank.

        All ranks must call this in the same order with the same tags.

        Args:
            tag: the purpose of the exchange; must match on all ranks.
            payload: this rank's bytes; at most 64 MiB in total over all ranks.
            timeout: seconds to wait for the others; `options.collective_timeout` by default.
            variable: the environment variable that sets the timeout, for error messages.

        Returns:
            The payloads in rank order.

        Raises:
            ProgramMismatchError: another rank passed a different tag.
            PeerLostError: a worker is lost, or has left.
            RendezvousError: a worker did not join in time. After this or any other error, the
                session is unusable on all ranks.
            ValueError: the payload is too large.

        Example:
            >>> session.exchange("batch size", b"32")  # doctest: +SKIP
            [b'32', b'32']
        """
        return self._run(tag, payload, timeout, variable, None)

    def coordinate(
        self,
        tag: str,
        payload: bytes,
        decide: Decision,
        timeout: float | None = None,
        *,
        variable: str = Variable.COLLECTIVE_TIMEOUT,
    ) -> bytes:
        """Makes rank 0 compute a reply to each rank from the payloads of all ranks.

        Like `exchange`, but the amount of data sent to a rank does not depend on the group's size.

        Args:
            tag: see `exchange`.
            payload: see `exchange`.
            decide: returns the replies in rank order; only rank 0 calls it, in any of its threads.
                It must not raise or block.
            timeout: see `exchange`.
            variable: see `exchange`.

        Returns:
            The reply to this rank.

        Raises:
            TfdistError, ValueError: see `exchange`.

        Example:
            >>> session.coordinate("rows", b"32", lambda p: [b"%d" % sum(map(int, p))] * len(p))
            ... # doctest: +SKIP
            b'64'
        """
        return self._run(tag, payload, timeout, variable, decide)[0]

    def _run(
        self,
        tag: str,
        payload: bytes,
        timeout: float | None,
        variable: str,
        decide: Decision | None,
    ) -> list[bytes]:
        if len(payload) * self.size > MAX_BYTES:
            raise ValueError(
                f"An exchange is for small payloads of at most {MAX_BYTES // self.size} bytes on "
                f"each of {self.size} workers. Received: {len(payload)} bytes. Send less."
            )
        seconds = self._options.collective_timeout if timeout is None else timeout
        with self._exchange_lock:
            self._state.check()
            try:
                sequence = self._state.expect(tag)
                self._role.join(sequence, tag, bytes(payload), seconds, variable, decide)
            except BaseException as error:
                # The ranks may now disagree on the number of exchanges.
                self.close(f"exchange {tag!r} was interrupted by {error!r}")
                raise
            # A fallback: rank 0 tracks the deadline and names the missing workers.
            timeout_error = RendezvousError(
                f"exchange {tag!r} timed out after {seconds:g} s, and {self._chief()} did not "
                f"report why. Check what it is doing."
            )
            deadline = time.monotonic() + seconds + _GRACE_SECONDS
            return self._state.result(sequence, deadline, timeout_error)

    def notify(self, key: str, text: str = "") -> None:
        """Posts a notice to all ranks, without blocking; rank 0 only.

        Args:
            key: the topic of the notice.
            text: its content.

        Raises:
            ValueError: this is not rank 0.
        """
        self._role.notify(key, text)

    def wait_notified(
        self, key: str, count: int, timeout: float | None = None
    ) -> list[shared_state.Notice]:
        """Waits until rank 0 has posted a total of `count` notices with this key.

        Args:
            key: the topic of the notices.
            count: the number of notices since the session started.
            timeout: seconds to wait; `options.collective_timeout` by default.

        Returns:
            All notices with this key, in order.

        Raises:
            PeerLostError: a worker is lost, or rank 0 has left (see `chief_has_left`).
            RendezvousError: rank 0 did not post in time.
        """
        seconds = self._options.collective_timeout if timeout is None else timeout
        timeout_error = RendezvousError(
            f"timed out after {seconds:g} s waiting for notice {count} of {key!r} from "
            f"{self._chief()}. Check what it is doing; if it is only slow, increase "
            f"TFDIST_COLLECTIVE_TIMEOUT."
        )
        warning = (
            f"rank {self.rank} is waiting for {self._chief()} to post {key!r}; it fails "
            f"after {seconds:g} s"
        )
        now = time.monotonic()
        warn = (now + self._options.stall_warning, warning)
        return self._state.notices(key, count, now + seconds, timeout_error, warn, self.stalled)

    def report_order(self, function: str, payload: bytes) -> None:
        """Reports this rank's order of values in collectives, without blocking.

        Rank 0 compares it with the other ranks' order. If they differ, the session fails on all
        ranks.

        Args:
            function: the function's name for users, the same on all ranks.
            payload: as returned by `order_checks.encode`.
        """
        self._role.report_order(function, payload)

    def gather(self, on_complete: Callable[[], object]) -> Gathering:
        """Requests the reports of all other ranks, without blocking; rank 0 only."""
        assert isinstance(self._role, Coordinator)
        return self._role.gather(on_complete)

    def presence(self, rank: int) -> Presence:
        """Returns the state of the connection to another rank; rank 0 only."""
        assert isinstance(self._role, Coordinator)
        return self._role.presence(rank)

    def on_peer_lost(self, callback: Callable[[str], object]) -> None:
        """Registers a callback for the loss of a worker.

        Args:
            callback: called once, with a line that names the rank, worker, address and cause. It
                runs in the thread that monitors the connections. If a worker is already lost, it
                runs immediately in the calling thread.
        """
        self._state.on_lost(callback)

    def on_peer_left(self, callback: Callable[[str], object]) -> None:
        """Registers a callback for workers that leave normally.

        Args:
            callback: called for each such worker, with a line that names it, in the thread that
                monitors the connections; immediately for workers that have already left.
        """
        self._state.on_left(callback)

    @property
    def news(self) -> int:
        """The descriptor of a socket to which a detector writes a byte; -1 without other ranks."""
        return self._role.connections.waker

    def detect_by(self, detect: Callable[[], Loss | None]) -> Callable[[], None]:
        """Adds a detector of lost workers to the connections of the session.

        Args:
            detect: returns a loss, if there is one. It is called at once, and in the thread of the
                connections whenever a byte has been written to `news`; it must not block.

        Returns:
            A function that removes the detector; to be called once.
        """

        def check() -> None:
            if (loss := detect()) is not None:
                self.lose(loss)

        remove = self._role.connections.on_wake(check)
        check()
        return remove

    def lose(self, loss: Loss) -> None:
        """Ends the session because a worker is lost; if called on rank 0, for all ranks."""
        names = [str(worker) for worker in self.topology.workers]
        rank = names.index(loss.worker) if loss.worker in names else None
        where = "" if rank is None else f"rank {rank}, "
        message = f"{where}{loss.message.rstrip('.')}; see its log"
        self._role.lose(message, rank, silent=loss.silent)

    def fail(self, message: str) -> None:
        """Ends the session with this message, like `lose`; if called on rank 0, for all ranks."""
        self._role.lose(message)

    def close(self, failure: str | None = None) -> None:
        """Says goodbye and closes the connections, within a second; further calls have no effect.

        Args:
            failure: why this worker failed; all other ranks then fail as well. None for a normal
                exit.
        """
        if os.getpid() != self._pid or not self._closing.acquire(blocking=False):
            return
        atexit.unregister(self._at_exit)
        self.address.evict()
        self._role.close(failure, _LINGER_SECONDS)
        why = f": {failure}" if failure else ""
        self._state.fail(PeerLostError(f"This worker has closed its session{why}."))

    def _chief(self) -> str:
        return f"rank 0, {self.topology.chief}" if self.topology.workers else "this process"

    def _at_exit(self) -> None:
        self.close(exit_reason.failure())


Report = dict[str, Any]
"""One rank's report, or rank 0's reply to it; JSON-serializable."""


class Lockstep:
    """Runs steps one after another on all ranks; rank 0 decides on the reply to each rank.

    Args:
        session: the connections to all ranks.
        subject: the purpose of the steps, for tags and messages.
        timeout: seconds that a step may wait for the other ranks.
    """

    def __init__(self, session: Session, subject: str, timeout: float) -> None:
        self._session = session
        self._subject = subject
        self._timeout = timeout

    def run(
        self,
        step: str,
        work: Callable[[], Report],
        decide: Callable[[list[Report]], Sequence[Report]],
    ) -> Report:
        """Runs this rank's work, and rank 0's decision on the reports of all ranks.

        Args:
            step: name of the step, the same on all ranks.
            work: returns this rank's report, or raises an error that all ranks are to raise.
            decide: returns a reply to each rank, given all reports in rank order, or raises an
                error that all ranks are to raise. Only rank 0 calls it.

        Returns:
            The reply to this rank.

        Raises:
            TfdistError: the work failed on some rank (all ranks raise the error of the lowest such
                rank), the decision failed, or the session has ended.
        """
        failure: Exception | None = None
        try:
            message: Report = {"report": work()}
        except Exception as error:
            failure = error
            message = {"error": shared_state.encode_error("error", self._error(error))}

        def replies(payloads: list[bytes]) -> list[bytes]:
            messages = [json.loads(payload) for payload in payloads]
            try:
                for message in messages:
                    if "error" in message:
                        return [json.dumps(message).encode()] * len(messages)
                told = decide([message["report"] for message in messages])
                return [json.dumps({"report": one}).encode() for one in told]
            except Exception as error:
                failed = {"error": shared_state.encode_error("error", self._error(error))}
                return [json.dumps(failed).encode()] * len(messages)

        reply = json.loads(
            self._session.coordinate(
                f"{self._subject}: {step}",
                json.dumps(message).encode(),
                replies,
                self._timeout,
                variable=Variable.START_TIMEOUT,
            )
        )
        if "error" in reply:
            raise shared_state.decode_error(reply["error"]) from failure
        report: Report = reply["report"]
        return report

    def _error(self, error: Exception) -> TfdistError:
        if isinstance(error, TfdistError):
            return error
        me = self._session.topology.me if self._session.topology.workers else "this process"
        if isinstance(error, ValueError):
            return ClusterError(f"{me}: {self._subject}: {error}")
        return RendezvousError(f"{me}: {self._subject} failed: {describe(error)}")
