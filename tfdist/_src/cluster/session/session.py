"""A session connects the ranks of a group: it exchanges byte strings and detects lost workers."""

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
    """Connects this process to the other processes of its group; created by `meet`.

    A background thread monitors the connections. If a worker dies, or sends no data for
    `options.heartbeat_timeout` seconds, the session fails on all ranks with the same message. When
    a process exits, its session automatically tells the other ranks that the process leaves. If an
    uncaught exception has terminated the process, the session also reports the exception. A forked
    child must not use the session of its parent.

    Args:
        topology: the workers of the group, and the rank of this process.
        sockets: the connections, by rank. Rank 0 has a connection to each other rank, and each
            other rank has a connection to rank 0. Empty for a single process.
        options: the job's options. `collective_timeout`, `heartbeat_timeout` and `stall_warning`
            are used.

    Attributes:
        report: the report of this rank, which rank 0 may request.
        address: the address of this rank, and the listener at this address.

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
        self._exchange_lock = threading.Lock()  # allows only one exchange at a time
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
        """The rank of this process in the group."""
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
        """The lost ranks that have sent no data for `options.heartbeat_timeout` seconds."""
        return sorted(self._state.silent_ranks)

    @property
    def loss(self) -> Loss | None:
        """The loss that has ended the session; None if no worker is known to be lost."""
        lost, silent = self.lost_ranks, self.silent_ranks
        if not lost or self.failure is None:
            return None
        return Loss(str(self.topology.workers[lost[0]]), self.failure, silent=lost[0] in silent)

    @property
    def chief_has_left(self) -> bool:
        """Whether rank 0 has left normally, so that it posts no more notices."""
        return self._state.chief_has_left

    @property
    def awaited(self) -> list[shared_state.PendingWait]:
        """The exchange and the notice for which threads of this process wait, if any."""
        return [one for one in (self._state.awaited, self._state.awaited_notice) if one]

    def record_exchanges(self, recorder: shared_state.ExchangeRecorder) -> None:
        """Registers the recorder of exchanges, and replaces an earlier recorder."""
        self._state.recorder = recorder

    def stalled(self, text: str) -> None:
        """Reports a long wait of this rank to the recorders on all other ranks."""
        self._role.stalled(f"{self.topology.me}: {text}")

    def check(self) -> None:
        """Raises an error if the session has ended.

        Raises:
            TfdistError: a worker is lost, or the session has failed or has been closed.
        """
        self._state.check()

    @property
    def failure(self) -> str | None:
        """The message of the error that has ended the session; None if it has not ended."""
        return self._state.failure

    def exchange(
        self,
        tag: str,
        payload: bytes,
        timeout: float | None = None,
        *,
        variable: str = Variable.COLLECTIVE_TIMEOUT,
    ) -> list[bytes]:
        """Sends a small byte string to all ranks, and receives the byte strings of all ranks.

        This is an all-gather. All ranks must call it in the same order with the same tags.

        Args:
            tag: the purpose of the exchange, which must be the same on all ranks.
            payload: the byte string of this rank. Its size times the number of ranks must not
                exceed 64 MiB.
            timeout: seconds to wait for the other ranks; `options.collective_timeout` by default.
            variable: the environment variable that sets the timeout, for error messages.

        Returns:
            The payloads in rank order.

        Raises:
            ProgramMismatchError: another rank has passed a different tag. After this error, or one
                of the next two errors, the session is unusable on all ranks.
            PeerLostError: a worker is lost, or has left the job.
            RendezvousError: a worker has not joined the exchange in time.
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
        """Sends a small byte string to rank 0, which computes a reply to each rank.

        All ranks must call this in the same order with the same tags, as with `exchange`. But each
        rank receives only its own reply instead of the payloads of all ranks.

        Args:
            tag: see `exchange`.
            payload: see `exchange`.
            decide: called on rank 0 with the payloads in rank order; returns the replies in rank
                order. It can run in any thread of rank 0, and it must not raise an error or block.
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
                # This rank has counted the exchange but may not have joined it. The numbers of the
                # next exchanges would then differ between the ranks, so the session must end.
                self.close(f"exchange {tag!r} was interrupted by {error!r}")
                raise
            # Normally, rank 0 detects the timeout, and its error names the missing workers. This
            # error is only raised if rank 0 does not report an error.
            timeout_error = RendezvousError(
                f"exchange {tag!r} timed out after {seconds:g} s, and {self._chief()} did not "
                f"report why. Check what it is doing."
            )
            deadline = time.monotonic() + seconds + _GRACE_SECONDS
            return self._state.result(sequence, deadline, timeout_error)

    def notify(self, key: str, text: str = "") -> None:
        """Posts a notice to all ranks without blocking. Only rank 0 may call this.

        Args:
            key: the topic of the notice.
            text: the content of the notice.

        Raises:
            ValueError: this process is not rank 0.
        """
        self._role.notify(key, text)

    def wait_notified(
        self, key: str, count: int, timeout: float | None = None
    ) -> list[shared_state.Notice]:
        """Waits until rank 0 has posted at least `count` notices with this key.

        Args:
            key: the topic of the notices.
            count: the number of notices. All notices since the start of the session count.
            timeout: seconds to wait; `options.collective_timeout` by default.

        Returns:
            All notices with this key, in the order in which they were posted.

        Raises:
            PeerLostError: a worker is lost, or rank 0 has left (see `chief_has_left`).
            RendezvousError: rank 0 has not posted enough notices in time.
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
        """Reports the order in which a function passes values to collectives, without blocking.

        Rank 0 compares the orders of all ranks. If the orders differ, the session fails on all
        ranks.

        Args:
            function: the name of the function in error messages, the same on all ranks.
            payload: the inputs of the function's collectives, as returned by `order_checks.encode`.
        """
        self._role.report_order(function, payload)

    def gather(self, on_complete: Callable[[], object]) -> Gathering:
        """Requests the reports of all other ranks without blocking. Only rank 0 may call this."""
        assert isinstance(self._role, Coordinator)
        return self._role.gather(on_complete)

    def presence(self, rank: int) -> Presence:
        """Returns the state of the connection to another rank. Only rank 0 may call this."""
        assert isinstance(self._role, Coordinator)
        return self._role.presence(rank)

    def on_peer_lost(self, callback: Callable[[str], object]) -> None:
        """Registers a callback that is called when a worker is lost.

        Args:
            callback: called once, for the first loss, with a message that describes the loss. The
                callback runs in the thread that detects the loss, which is usually the thread of
                the connections. If a worker is already lost, it runs immediately in the calling
                thread.
        """
        self._state.on_lost(callback)

    def on_peer_left(self, callback: Callable[[str], object]) -> None:
        """Registers a callback that is called when a worker leaves normally.

        Args:
            callback: called for each worker that leaves, with a message that names the worker. The
                callback runs in the thread of the connections. For workers that have already left,
                it runs immediately in the calling thread.
        """
        self._state.on_left(callback)

    @property
    def news(self) -> int:
        """The file descriptor of a socket, with which a detector announces a lost worker.

        When a byte is written to the socket, the session calls all detectors (see `detect_by`). -1
        if the group has no other ranks.
        """
        return self._role.connections.waker

    def detect_by(self, detect: Callable[[], Loss | None]) -> Callable[[], None]:
        """Adds a detector, another means by which the session learns of lost workers.

        Args:
            detect: returns the loss of a worker, or None. It is called immediately in the calling
                thread. It is called again in the thread of the connections each time that a byte
                has been written to `news`. It must not block.

        Returns:
            A function that removes the detector. It may be called only once.
        """

        def check() -> None:
            if (loss := detect()) is not None:
                self.lose(loss)

        remove = self._role.connections.on_wake(check)
        check()
        return remove

    def lose(self, loss: Loss) -> None:
        """Ends the session because a worker is lost.

        If rank 0 calls this, the session ends on all ranks. If another rank calls it, the session
        ends only on that rank.
        """
        names = [str(worker) for worker in self.topology.workers]
        rank = names.index(loss.worker) if loss.worker in names else None
        where = "" if rank is None else f"rank {rank}, "
        message = f"{where}{loss.message.rstrip('.')}; see its log"
        self._role.lose(message, rank, silent=loss.silent)

    def fail(self, message: str) -> None:
        """Ends the session with an error message, on the same ranks as `lose`."""
        self._role.lose(message)

    def close(self, failure: str | None = None) -> None:
        """Tells the other ranks that this rank leaves, and closes the connections.

        This takes at most about a second. Further calls have no effect.

        Args:
            failure: the reason why this worker has failed; the session then fails on all ranks.
                None if this worker leaves normally.
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
    """Runs a sequence of steps on all ranks of a session.

    In each step, all ranks do some work and send a report to rank 0, which sends a reply to each
    rank. If a rank fails, all ranks raise the same error.

    Args:
        session: the session of all ranks.
        subject: the purpose of the steps, for tags and messages.
        timeout: the number of seconds for which a step may wait for the other ranks.
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
        """Runs one step; all ranks must call this together.

        Args:
            step: the name of the step, the same on all ranks.
            work: does the work of this rank and returns its report. If it raises an error, all
                ranks raise the error.
            decide: called on rank 0 with the reports in rank order; returns the replies in rank
                order. If it raises an error, all ranks raise the error.

        Returns:
            The reply to this rank.

        Raises:
            TfdistError: `work` has failed on a rank, `decide` has failed, or the session has ended.
                If `work` has failed on several ranks, this is the error of the lowest rank.
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
