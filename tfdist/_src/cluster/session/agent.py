"""The part of a session that runs on all ranks except rank 0, with a connection to rank 0."""

import time
from collections.abc import Sequence
from socket import socket

from tfdist._src.cluster.cluster_spec import Worker
from tfdist._src.cluster.net.framing import Header, encode
from tfdist._src.cluster.session.connections import Connections, LocalReport
from tfdist._src.cluster.session.coordinator import Decision, left_message, loss_message
from tfdist._src.cluster.session.shared_state import SessionState, decode_error, decode_result
from tfdist._src.log import logger
from tfdist.errors import PeerLostError

_MARGIN = 1.5


def is_overdue(waited: float, quiet: float, stall_warning: float) -> bool:
    """Whether rank 0 should already have sent a warning about a stalled exchange.

    Rank 0 sends the first warning after `stall_warning` seconds, and another one each time that the
    wait has doubled. If a warning is overdue, rank 0 may be suspended.

    Args:
        waited: the number of seconds since this rank has joined the exchange.
        quiet: the number of seconds since the last warning, or since this rank has joined the
            exchange if there was no warning.
        stall_warning: the number of seconds until the first warning.
    """
    return quiet >= _MARGIN * max(stall_warning, waited - quiet)


class Agent:
    """The connection of this rank to rank 0. Agents exist on all ranks except rank 0.

    Args:
        workers: the workers of the group in rank order.
        sock: the connection to rank 0.
        state: the state of the session in this process, which the agent updates.
        report: the report of this process, which rank 0 may request.
        heartbeat_timeout: seconds without a heartbeat after which rank 0 is considered lost.
        stall_warning: seconds after which rank 0 warns about a stalled exchange.
    """

    def __init__(
        self,
        workers: Sequence[Worker],
        sock: socket,
        state: SessionState,
        report: LocalReport,
        heartbeat_timeout: float,
        stall_warning: float,
    ) -> None:
        self._workers = workers
        self._chief = workers[0]
        self._state = state
        self._report = report
        self._stall_warning = stall_warning
        self._told_ns = 0  # the time of the last warning from rank 0 or from this rank itself
        self._connections = Connections({0: sock}, self, heartbeat_timeout)
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
        """Joins an exchange. `decide` is ignored, because only rank 0 calls it."""
        header = {
            "kind": "join",
            "sequence": sequence,
            "tag": tag,
            "timeout": timeout,
            "variable": variable,
        }
        self._connections.send(0, encode(header, payload))

    def notify(self, key: str, text: str) -> None:
        """Raises ValueError, because only rank 0 may post notices."""
        raise ValueError(
            f"notify() is for rank 0; the other ranks call wait_notified(). Received: {key!r} on "
            f"another rank. Call it only if session.rank == 0."
        )

    def stalled(self, text: str) -> None:
        """Reports a long wait of this rank to rank 0, which forwards the report to all others."""
        self._connections.send(0, encode({"kind": "stalled", "text": text}))

    def report_order(self, function: str, payload: bytes) -> None:
        """Sends rank 0 the order in which a function of this rank passes values to collectives."""
        self._connections.send(0, encode({"kind": "order", "function": function}, payload))

    def lose(self, message: str, rank: int | None = None, *, silent: bool = False) -> None:
        """Ends the session on this rank because a worker is lost (see `Coordinator.lose`)."""
        self._state.lose(message, rank, silent=silent)

    @property
    def connections(self) -> Connections:
        """The connections, which run in a separate thread."""
        return self._connections

    def close(self, failure: str | None, linger: float) -> None:
        """Tells rank 0 that this rank leaves, and closes the connection."""
        self._connections.close(encode({"kind": "bye", "failure": failure}), linger)

    def on_frame(self, rank: int, header: Header, payload: bytes) -> None:
        kind = header["kind"]
        if kind == "result":
            self._state.deliver(
                header["sequence"], decode_result(header, payload, len(self._workers))
            )
        elif kind == "reply":
            self._state.deliver(header["sequence"], [payload])
        elif kind == "notice":
            self._state.notice(header["key"], header["text"])
        elif kind == "ask":
            answer = {"kind": "report", "number": header["number"]}
            self._connections.send(0, encode(answer, self._report.encoded()))
        elif kind == "stalled":
            self._told_ns = time.monotonic_ns()
            self._state.stall(str(header["text"]))
        elif kind == "failed":
            self._state.fail(decode_error(header))
        elif kind == "lost":
            lost, silent = header.get("rank"), header.get("silent") is True
            rank_lost = lost if type(lost) is int else None
            self._state.lose(str(decode_error(header)), rank_lost, silent=silent)
        elif kind == "left":
            self._state.leave(left_message(header["rank"], self._workers[header["rank"]]))
        elif kind == "bye":
            self._connections.drop(0)
            if header["failure"] is not None:
                self._state.lose(loss_message(0, self._chief, f"failed: {header['failure']}"), 0)
                return
            self._state.chief_has_left = True
            self._state.leave(left_message(0, self._chief))
            self._state.fail(
                PeerLostError(
                    f"rank 0, {self._chief}, has left the job, and the workers cannot communicate "
                    f"without it. Run the same number of steps on all workers."
                )
            )
        else:
            raise ValueError(kind)

    def on_end(self, rank: int, reason: str, *, silent: bool) -> None:
        self._state.lose(loss_message(0, self._chief, f"is lost: {reason}"), 0, silent=silent)

    def on_tick(self, now: float) -> None:
        """Logs a warning about a stalled exchange if the warning of rank 0 is overdue."""
        awaited = self._state.awaited
        if awaited is None:
            return
        now_ns = time.monotonic_ns()
        told_ns = max(awaited.since_ns, self._told_ns)
        quiet, waited = 1e-9 * (now_ns - told_ns), 1e-9 * (now_ns - awaited.since_ns)
        if not is_overdue(waited, quiet, self._stall_warning):
            return
        self._told_ns = now_ns
        silence = self._connections.silence(0) or 0.0
        line = (
            f"{awaited.what} has waited {waited:.0f} s on this worker, and rank 0, {self._chief}, "
            f"has not named the missing workers for {quiet:.0f} s; it was last heard from "
            f"{silence:.0f} s ago"
        )
        logger.warning(line)
        self._state.stall(line)
