"""The part of a session that runs on rank 0.

Rank 0 completes exchanges, posts notices, and reports lost workers to the other ranks.
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from socket import socket

from tfdist._src.cluster.cluster_spec import Worker
from tfdist._src.cluster.net.framing import Header, encode
from tfdist._src.cluster.net.wait_messages import named
from tfdist._src.cluster.session.connections import Connections, Gathering, LocalReport, Presence
from tfdist._src.cluster.session.order_checks import CrossedWait, TracedOrders, crossed_waits
from tfdist._src.cluster.session.shared_state import SessionState, encode_error, encode_result
from tfdist._src.log import logger
from tfdist._src.options import Variable
from tfdist.errors import PeerLostError, ProgramMismatchError, RendezvousError, TfdistError

Decision = Callable[[list[bytes]], list[bytes]]
"""Returns rank 0's reply to each rank, given the payloads of all; it must not raise or block."""


@dataclass
class Exchange:
    """One exchange that some ranks have joined.

    Attributes:
        tag: the purpose of the exchange, the same on all ranks.
        first: the rank that has joined first.
        deadline: the earliest time at which a rank times out.
        timeout: the timeout of that rank in seconds.
        variable: the environment variable that sets this timeout.
        payloads: the payloads of the ranks that have joined, by rank.
        decide: computes the reply to each rank; None if all ranks receive all payloads.
        started: the time at which the first rank has joined.
        warned: how long the exchange had waited at the last warning, in seconds.
    """

    tag: str
    first: int
    deadline: float
    timeout: float
    variable: str
    payloads: dict[int, bytes] = field(default_factory=dict)
    decide: Decision | None = None
    started: float = 0.0
    warned: float = 0.0

    def in_rank_order(self) -> list[bytes]:
        """Returns the payloads in rank order. All ranks must have joined."""
        return [self.payloads[rank] for rank in range(len(self.payloads))]


class PendingExchanges:
    """The exchanges that some ranks have not joined yet.

    Args:
        workers: the workers of the group in rank order; empty for a single process.

    Example:
        >>> exchanges = PendingExchanges(())
        >>> exchanges.join(0, 1, "greeting", b"hello", deadline=1.0, timeout=1.0).in_rank_order()
        [b'hello']
    """

    def __init__(self, workers: Sequence[Worker]) -> None:
        self._workers = workers
        self._size = max(1, len(workers))
        self._pending: dict[int, Exchange] = {}
        self._gone: set[int] = set()

    def join(
        self,
        rank: int,
        sequence: int,
        tag: str,
        payload: bytes,
        *,
        deadline: float,
        timeout: float,
        variable: str = Variable.COLLECTIVE_TIMEOUT,
        decide: Decision | None = None,
    ) -> Exchange | None:
        """Records that a rank joins an exchange.

        Args:
            rank: the rank that joins.
            sequence: the number of the exchange on this rank, starting at 1.
            tag: the tag that this rank has passed.
            payload: the payload of this rank.
            deadline: the time at which this rank times out, on the clock of the caller.
            timeout: the number of seconds from now to the deadline.
            variable: the environment variable that sets the timeout.
            decide: the function that computes the reply to each rank. Only rank 0 passes it.

        Returns:
            The exchange if all ranks have joined it, otherwise None.

        Raises:
            ProgramMismatchError: another rank has passed a different tag.
        """
        new = Exchange(tag, rank, deadline, timeout, variable, started=deadline - timeout)
        current = self._pending.setdefault(sequence, new)
        if tag != current.tag:
            raise ProgramMismatchError(
                f"The workers run different programs: exchange {sequence} is {current.tag!r} at "
                f"{self._name(current.first)} and {tag!r} at {self._name(rank)}. Run the same "
                f"script with the same arguments on all workers, and train and predict in one "
                f"thread."
            )
        if deadline < current.deadline:
            current.deadline, current.timeout, current.variable = deadline, timeout, variable
        current.payloads[rank] = payload
        current.decide = current.decide or decide
        if len(current.payloads) < self._size:
            return None
        return self._pending.pop(sequence)

    def leave(self, rank: int) -> None:
        """Records that a rank has left normally, so that it joins no more exchanges."""
        self._gone.add(rank)

    def stuck(self, now: float) -> TfdistError | None:
        """Returns an error if an exchange can no longer complete; otherwise None.

        Args:
            now: the current time, on the same clock as the deadlines.
        """
        for current in self._pending.values():
            # This code runs each time that a rank joins, so it must not iterate over all ranks.
            if gone := self._gone.difference(current.payloads):
                first = min(gone)
                return PeerLostError(
                    f"rank {first}, {self._name(first)}, has left the job without joining "
                    f"exchange {current.tag!r}. Run the same number of steps on all workers."
                )
            if now >= current.deadline:
                return RendezvousError(
                    f"exchange {current.tag!r} timed out after {current.timeout:g} s waiting for "
                    f"{self._names(self._missing(current))}. Check what they are doing; if they "
                    f"are only slow, increase {current.variable}."
                )
        return None

    def slow(self, now: float, stall_warning: float) -> list[str]:
        """Returns warnings about the exchanges that have waited for a long time.

        Each exchange gets another warning each time that its wait has doubled.

        Args:
            now: the current time, on the same clock as the deadlines.
            stall_warning: the number of seconds until the first warning.
        """
        lines = []
        for current in self._pending.values():
            waited = now - current.started
            if waited >= max(stall_warning, 2 * current.warned):
                current.warned = waited
                lines.append(
                    f"exchange {current.tag!r} has waited {waited:.0f} s for "
                    f"{self._names(self._missing(current))}; it fails after {current.timeout:g} s"
                )
        return lines

    def waited(self, now: float) -> float:
        """Returns how long the oldest exchange has waited, in seconds; 0 without exchanges."""
        return max((now - current.started for current in self._pending.values()), default=0.0)

    def crossed_waits(self, reports: Mapping[int, bytes]) -> set[CrossedWait]:
        """Finds pairs of ranks that wait for each other (see `CrossedWait`).

        Args:
            reports: the reports of the ranks as JSON, by rank.
        """
        names = {rank: str(worker) for rank, worker in enumerate(self._workers)}
        return set().union(
            *(
                crossed_waits(sequence, current.tag, set(current.payloads), reports, names)
                for sequence, current in self._pending.items()
            )
        )

    def _missing(self, current: Exchange) -> list[int]:
        return [rank for rank in range(self._size) if rank not in current.payloads]

    def _names(self, ranks: Sequence[int]) -> str:
        names = named([self._workers[rank] for rank in ranks])
        return f"{len(ranks)} of {self._size} workers: {names}"

    def _name(self, rank: int) -> str:
        return str(self._workers[rank])


# The minimum time between two reports of stalls. If many ranks wait for the same rank, all of them
# report a stall, but one report is enough.
_BETWEEN_STALLS = 1.0
_MAX_QUESTIONS = 4


def loss_message(rank: int, worker: Worker, what: str) -> str:
    """Returns the message that reports a lost worker."""
    return f"rank {rank}, {worker} {what}; see its log"


def left_message(rank: int, worker: Worker) -> str:
    """Returns the message that reports a worker that has left normally."""
    return f"rank {rank}, {worker}, has left the job; run the same number of steps on all workers"


class Coordinator:
    """The connections of rank 0 to all other ranks. The coordinator exists only on rank 0.

    Args:
        workers: the workers of the group in rank order.
        sockets: the connection to each other rank; empty for a single process.
        state: the state of the session in this process, which the coordinator updates.
        report: the report of this process.
        heartbeat_timeout: seconds without a heartbeat after which a worker is considered lost.
        stall_warning: seconds after which rank 0 warns about a stalled exchange.
    """

    def __init__(
        self,
        workers: Sequence[Worker],
        sockets: Mapping[int, socket],
        state: SessionState,
        report: LocalReport,
        heartbeat_timeout: float,
        stall_warning: float,
    ) -> None:
        self._workers = workers
        self._state = state
        self._report = report
        self._exchanges = PendingExchanges(workers)
        self._orders = TracedOrders(workers)
        self._stall_warning = stall_warning
        self._lock = threading.RLock()  # guards the exchanges and the order of the frames
        self._failed = False
        self._lost = False
        self._told_of_stall = -_BETWEEN_STALLS
        self._gone: dict[int, str] = {}
        self._gatherings: dict[int, Gathering] = {}
        self._asked = 0
        self._next_question = 0.0
        self._question: Gathering | None = None
        self._crossed: set[CrossedWait] = set()
        self._connections = Connections(sockets, self, heartbeat_timeout)
        self._connections.start()

    def join(
        self,
        sequence: int,
        tag: str,
        payload: bytes,
        timeout: float,
        variable: str,
        decide: Decision | None,
    ) -> None:
        """Joins an exchange as rank 0. `decide`, if any, computes the reply to each rank."""
        self._join(0, sequence, tag, payload, timeout, variable, decide)

    def notify(self, key: str, text: str) -> None:
        """Posts a notice to all ranks."""
        self._connections.broadcast(encode({"kind": "notice", "key": key, "text": text}))
        self._state.notice(key, text)

    def stalled(self, text: str, rank: int = 0) -> None:
        """Reports a long wait of one rank to all other ranks.

        Args:
            text: a description of the operation and of the ranks for which it waits.
            rank: the rank that waits.
        """
        now = time.monotonic()
        with self._lock:
            if now - self._told_of_stall < _BETWEEN_STALLS:
                return
            self._told_of_stall = now
        frame = encode({"kind": "stalled", "text": text})
        for other in self._connections.ranks:
            if other != rank:
                self._connections.send(other, frame)
        if rank:
            self._state.stall(text)

    def report_order(self, function: str, payload: bytes, rank: int = 0) -> None:
        """Checks the order in which a function of one rank passes values to collectives.

        If another rank passes the same values in a different order, the session fails.
        """
        with self._lock:
            if error := self._orders.add(rank, function, payload):
                self._mismatch(error)

    def gather(self, on_complete: Callable[[], object]) -> Gathering:
        """Requests the reports of all other ranks. Replies to much older requests are ignored.

        Args:
            on_complete: called in the thread of the connections when no more reports are expected.
        """
        with self._lock:
            self._asked += 1
            gathering = Gathering(self._asked, self._connections.ranks, on_complete)
            self._gatherings[self._asked] = gathering
            self._gatherings.pop(self._asked - _MAX_QUESTIONS, None)
        self._connections.broadcast(encode({"kind": "ask", "number": gathering.number}))
        return gathering

    def presence(self, rank: int) -> Presence:
        """Returns the state of the connection to another rank."""
        gone = self._gone.get(rank, "")
        return Presence(None if gone else self._connections.silence(rank), gone)

    @property
    def connections(self) -> Connections:
        """The connections, which run in a separate thread."""
        return self._connections

    def close(self, failure: str | None, linger: float) -> None:
        """Tells all ranks that rank 0 leaves, and closes the connections."""
        self._connections.close(encode({"kind": "bye", "failure": failure}), linger)

    def on_frame(self, rank: int, header: Header, payload: bytes) -> None:
        if header["kind"] == "join":
            sequence, tag, timeout = header["sequence"], header["tag"], header["timeout"]
            variable = str(header["variable"])
            self._join(rank, int(sequence), str(tag), payload, float(timeout), variable)
        elif header["kind"] == "report":
            if gathering := self._gatherings.get(header["number"]):
                gathering.add(rank, payload)
        elif header["kind"] == "stalled":
            self.stalled(str(header["text"]), rank)
        elif header["kind"] == "order":
            self.report_order(str(header["function"]), payload, rank)
        elif header["kind"] == "bye":
            self._connections.drop(rank)
            if header["failure"] is not None:
                self._end(rank, f"failed: {header['failure']}")
                return
            self._note_gone(rank, "has left the job")
            with self._lock:
                self._exchanges.leave(rank)
                self.on_tick(time.monotonic())
            self._connections.broadcast(encode({"kind": "left", "rank": rank}))
            self._state.leave(left_message(rank, self._workers[rank]))
        else:
            raise ValueError(header["kind"])

    def on_end(self, rank: int, reason: str, *, silent: bool) -> None:
        self._end(rank, f"is lost: {reason}", silent=silent)

    def on_tick(self, now: float) -> None:
        with self._lock:
            if error := self._exchanges.stuck(now):
                self._fail(error)
            if not self._failed:
                for line in self._exchanges.slow(now, self._stall_warning):
                    logger.warning(line)
                    self._connections.broadcast(encode({"kind": "stalled", "text": line}))
                    self._state.stall(line)
                self._check_crossed_waits(now)

    def _check_crossed_waits(self, now: float) -> None:
        """Fails the session if two ranks wait for each other (see `CrossedWait`).

        This method requests two reports from each rank, one after the other. Two ranks count only
        if both reports show the same waits. Otherwise, a wait that is about to end would count.
        """
        if self._question is not None and self._question.is_complete:
            reports = {0: self._report.encoded(), **self._question.reports}
            found = self._exchanges.crossed_waits(reports)
            again, self._crossed, self._question = found & self._crossed, found, None
            for one in sorted(again, key=lambda one: one.in_operation)[:1]:
                self._mismatch(one.message)
        elif self._exchanges.waited(now) < self._stall_warning:
            self._crossed = set()
        elif now >= self._next_question:
            self._next_question = now + self._stall_warning / 2
            self._question = self.gather(lambda: None)

    def _join(
        self,
        rank: int,
        sequence: int,
        tag: str,
        payload: bytes,
        timeout: float,
        variable: str,
        decide: Decision | None = None,
    ) -> None:
        now = time.monotonic()
        with self._lock:
            if self._failed:  # this rank will soon receive the error
                return
            try:
                complete = self._exchanges.join(
                    rank,
                    sequence,
                    tag,
                    payload,
                    deadline=now + timeout,
                    timeout=timeout,
                    variable=variable,
                    decide=decide,
                )
            except TfdistError as error:
                self._fail(error)
                return
            if complete is None:
                self.on_tick(now)
            elif complete.decide is None:
                payloads = complete.in_rank_order()
                self._connections.broadcast(encode_result(sequence, payloads))
                self._state.deliver(sequence, payloads)
            else:
                replies = complete.decide(complete.in_rank_order())
                header = {"kind": "reply", "sequence": sequence}
                # Encode equal replies only once, because all ranks often receive the same reply.
                frames = {reply: encode(header, reply) for reply in set(replies)}
                for other in range(1, len(replies)):
                    self._connections.send(other, frames[replies[other]])
                self._state.deliver(sequence, [replies[0]])

    def _end(self, rank: int, what: str, *, silent: bool = False) -> None:
        self._note_gone(rank, what)
        self.lose(loss_message(rank, self._workers[rank], what), rank, silent=silent)

    def _note_gone(self, rank: int, what: str) -> None:
        self._gone[rank] = what
        for gathering in list(self._gatherings.values()):
            gathering.give_up(rank)

    def _fail(self, error: TfdistError) -> None:
        """Fails the session on all ranks; only the first error counts."""
        with self._lock:
            if not self._failed:
                self._failed = True
                self._connections.broadcast(encode(encode_error("failed", error)))
                self._state.fail(error)

    def _mismatch(self, message: str) -> None:
        """Ends the session and the collectives, because the ranks run different programs."""
        self._fail(ProgramMismatchError(message))
        self.lose(message)

    def lose(self, message: str, rank: int | None = None, *, silent: bool = False) -> None:
        """Ends the session on all ranks because a worker is lost; only the first call counts.

        Args:
            message: a description of the loss.
            rank: the lost rank, if it is known.
            silent: whether the rank is considered lost because it has been silent for too long.
        """
        with self._lock:
            if self._lost:
                return
            self._failed = self._lost = True
            header = {**encode_error("lost", PeerLostError(message)), "rank": rank}
            self._connections.broadcast(encode({**header, "silent": silent}))
        self._state.lose(message, rank, silent=silent)
