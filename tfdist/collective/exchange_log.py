"""The exchanges of the session in the flight log, as collectives of a communicator."""

from __future__ import annotations

import json
import time
from typing import Any

from tfdist.cluster import Topology
from tfdist.cluster.session.observer import Awaited

NAME = b"session"


class ExchangeLog:
    """Tells the core of the last exchange, and has the flight log written when one stalls.

    It is told at the beginning and at the end, not asked: while a thread keeps Python's lock, the
    core still writes the log.

    Args:
        core: the native library.
        topology: the job, and this process's rank in it.
    """

    def __init__(self, core: Any, topology: Topology) -> None:
        addresses = [worker.address.rpartition(":")[0] for worker in topology.workers]
        self._core = core
        self._is_waiting = False
        self._group: dict[str, Any] = {
            "name": NAME.decode(),
            "rank": topology.rank,
            "size": topology.size,
            "ranks": [str(worker) for worker in topology.workers],
            "hosts": [addresses.index(address) for address in addresses],
            "aborted": None,
            "queued": [],
            "peers": [],
            "links": [],
        }
        self._show()

    def on_exchange_begin(self, exchange: Awaited) -> None:
        """Shows the exchange, which is in progress."""
        self._is_waiting = True
        self._show(_record(exchange))

    def on_exchange_end(self, exchange: Awaited, failed: bool) -> None:
        """Shows that the exchange has ended."""
        self._is_waiting = False
        self._show(_record(exchange) | {"ended_ns": time.monotonic_ns(), "failed": failed})

    def on_stall(self, message: str) -> None:
        """Has the flight log written, with the message."""
        kind = b"stall" if self._is_waiting else b"waited"
        self._core.tfd_flight_ask(kind, NAME, message.encode())

    def _show(self, *records: dict[str, Any]) -> None:
        self._core.tfd_flight_set_session(json.dumps(self._group | {"records": records}).encode())


def _record(exchange: Awaited) -> dict[str, Any]:
    return {
        "number": exchange.sequence,
        "sequence": exchange.sequence,
        "kind": "exchange",
        "what": exchange.what,
        "name": exchange.tag,
        "type": "",
        "shape": None,
        "tensors": 0,
        "elements": 0,
        "op": "",
        "root": 0,
        "shapes": "",
        "codec": "",
        "forced_algorithm": "",
        "failures": 0,
        "peer": -1,
        "bytes": 0,
        "algorithm": "",
        "enqueued_ns": exchange.since_ns,
        "begun_ns": exchange.since_ns,
        "last_arrived_ns": 0,
        "ended_ns": 0,
        "between_begun_ns": 0,
        "between_ended_ns": 0,
        "coding_ns": 0,
        "last": -1,
        "arrivals_ns": [],
        "failed": False,
    }
