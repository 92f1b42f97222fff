"""The other ranks' part in a session: one connection, to rank 0."""

from __future__ import annotations

from collections.abc import Sequence
from socket import socket

from tfdist.cluster.net.framing import Header, encode
from tfdist.cluster.session.connections import Connections
from tfdist.cluster.session.coordinator import ended, loss
from tfdist.cluster.session.error_codec import decode_error
from tfdist.cluster.session.state import SessionState
from tfdist.cluster.spec.topology import Worker
from tfdist.errors import PeerLostError


class Agent:
    """The connection of a rank to rank 0.

    Args:
        workers: the group in rank order.
        sock: the connection.
        state: what this process knows, to be kept up to date.
        silence: seconds without a sign of life after which rank 0 counts as lost.
    """

    def __init__(
        self, workers: Sequence[Worker], sock: socket, state: SessionState, silence: float
    ) -> None:
        self._workers = workers
        self._chief = workers[0]
        self._state = state
        self._links = Connections({0: sock}, self, silence)
        self._links.start()

    def join(self, sequence: int, tag: str, payload: bytes, timeout: float, variable: str) -> None:
        """Joins an exchange."""
        header = {
            "kind": "join",
            "sequence": sequence,
            "tag": tag,
            "timeout": timeout,
            "variable": variable,
        }
        self._links.send(0, encode(header, payload))

    def notify(self, key: str, text: str) -> None:
        """Only rank 0 posts."""
        raise ValueError(
            f"notify() is for rank 0; the others wait_notified(). Received: {key!r} on another "
            f"rank. Call it where session.rank == 0."
        )

    def close(self, farewell: str | None, linger: float) -> None:
        """Says goodbye and closes the connection."""
        self._links.close(encode({"kind": "bye", "failure": farewell}), linger)

    def on_frame(self, rank: int, header: Header, payload: bytes) -> None:
        kind = header["kind"]
        if kind == "result":
            parts, start = [], 0
            for size in header["sizes"]:
                parts.append(payload[start : start + size])
                start += size
            self._state.deliver(header["sequence"], parts)
        elif kind == "notice":
            self._state.notice(header["key"], header["text"])
        elif kind == "failed":
            self._state.fail(decode_error(header))
        elif kind == "lost":
            self._state.lose(str(decode_error(header)))
        elif kind == "left":
            self._state.leave(ended(header["rank"], self._workers[header["rank"]]))
        elif kind == "bye":
            self._links.drop(0)
            if header["failure"] is not None:
                self._state.lose(loss(0, self._chief, f"failed: {header['failure']}"))
                return
            self._state.leave(ended(0, self._chief))
            self._state.fail(
                PeerLostError(
                    f"rank 0, {self._chief}, has ended, and nothing passes between the workers "
                    f"without it. Run the same number of steps on all workers."
                )
            )
        else:
            raise ValueError(kind)

    def on_end(self, rank: int, reason: str) -> None:
        self._state.lose(loss(0, self._chief, f"is lost: {reason}"))

    def on_tick(self, now: float) -> None:
        """Nothing is due here: rank 0 watches over the deadlines."""
