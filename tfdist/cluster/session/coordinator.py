"""Rank 0's part in a session: completes exchanges, passes on notices, tells all of a loss."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from socket import socket

from tfdist.cluster.net.framing import Header, encode
from tfdist.cluster.net.wait_messages import say
from tfdist.cluster.session.connections import Connections
from tfdist.cluster.session.error_codec import encode_error
from tfdist.cluster.session.pending_exchanges import PendingExchanges
from tfdist.cluster.session.state import SessionState
from tfdist.cluster.spec.topology import Worker
from tfdist.errors import PeerLostError, TfdistError


def loss(rank: int, worker: Worker, what: str) -> str:
    """The line that says which worker is lost and how."""
    return f"rank {rank}, {worker} {what}; see its log"


def ended(rank: int, worker: Worker) -> str:
    """The line that says which worker has ended normally."""
    return f"rank {rank}, {worker}, has ended; run the same number of steps on all workers"


class Coordinator:
    """The connections of rank 0 to all others.

    Args:
        workers: the group in rank order.
        sockets: the connection to each other rank; none for a process alone.
        state: what this process knows, to be kept up to date.
        silence: seconds without a sign of life after which a worker counts as lost.
        patience: seconds after which a line says for whom an exchange waits.
    """

    def __init__(
        self,
        workers: Sequence[Worker],
        sockets: Mapping[int, socket],
        state: SessionState,
        silence: float,
        patience: float,
    ) -> None:
        self._workers = workers
        self._state = state
        self._ledger = PendingExchanges(workers)
        self._patience = patience
        self._lock = threading.RLock()  # guards the ledger, and keeps frames in its order
        self._failed = False
        self._lost = False
        self._links = Connections(sockets, self, silence)
        self._links.start()

    def join(self, sequence: int, tag: str, payload: bytes, timeout: float, variable: str) -> None:
        """Joins an exchange as rank 0."""
        self._join(0, sequence, tag, payload, timeout, variable)

    def notify(self, key: str, text: str) -> None:
        """Posts a notice to all others."""
        self._links.broadcast(encode({"kind": "notice", "key": key, "text": text}))
        self._state.notice(key, text)

    def close(self, farewell: str | None, linger: float) -> None:
        """Says goodbye and closes the connections."""
        self._links.close(encode({"kind": "bye", "failure": farewell}), linger)

    def on_frame(self, rank: int, header: Header, payload: bytes) -> None:
        if header["kind"] == "join":
            sequence, tag, timeout = header["sequence"], header["tag"], header["timeout"]
            variable = str(header["variable"])
            self._join(rank, int(sequence), str(tag), payload, float(timeout), variable)
        elif header["kind"] == "bye":
            self._links.drop(rank)
            if header["failure"] is not None:
                self._lose(loss(rank, self._workers[rank], f"failed: {header['failure']}"))
                return
            with self._lock:
                self._ledger.leave(rank)
                self.on_tick(time.monotonic())
            self._links.broadcast(encode({"kind": "left", "rank": rank}))
            self._state.leave(ended(rank, self._workers[rank]))
        else:
            raise ValueError(header["kind"])

    def on_end(self, rank: int, reason: str) -> None:
        self._lose(loss(rank, self._workers[rank], f"is lost: {reason}"))

    def on_tick(self, now: float) -> None:
        with self._lock:
            if error := self._ledger.stuck(now):
                self._fail(error)
            if not self._failed:
                for line in self._ledger.slow(now, self._patience):
                    say(line)

    def _join(
        self, rank: int, sequence: int, tag: str, payload: bytes, timeout: float, variable: str
    ) -> None:
        now = time.monotonic()
        with self._lock:
            if self._failed:  # that rank is about to hear of it
                return
            try:
                payloads = self._ledger.join(
                    rank,
                    sequence,
                    tag,
                    payload,
                    deadline=now + timeout,
                    timeout=timeout,
                    variable=variable,
                )
            except TfdistError as error:
                self._fail(error)
                return
            if payloads is None:
                self.on_tick(now)
                return
            sizes = [len(part) for part in payloads]
            header = {"kind": "result", "sequence": sequence, "sizes": sizes}
            self._links.broadcast(encode(header, b"".join(payloads)))
            self._state.deliver(sequence, payloads)

    def _fail(self, error: TfdistError) -> None:
        """Ends the group on all ranks; the first error stays."""
        with self._lock:
            if not self._failed:
                self._failed = True
                self._links.broadcast(encode(encode_error("failed", error)))
                self._state.fail(error)

    def _lose(self, message: str) -> None:
        """Tells all ranks that a worker is lost; the first loss stays."""
        with self._lock:
            if self._lost:
                return
            self._failed = self._lost = True
            self._links.broadcast(encode(encode_error("lost", PeerLostError(message))))
        self._state.lose(message)
