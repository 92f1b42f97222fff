"""The exchanges and notices of the session in the flight log, as those of a communicator."""

from __future__ import annotations

import json
import threading
import time
from typing import Any

from tfdist._src.cluster import Topology
from tfdist._src.cluster.session.shared_state import Awaited

NAME = b"session"


class ExchangeLog:
    """Tells the core of the last exchange and notice, and has the flight log written on a stall.

    An exchange is like a collective, and a notice like a message that rank 0 sends.

    It is told at the beginning and at the end, not asked: while a thread keeps Python's lock, the
    core still writes the log.

    Args:
        core: the native library.
        topology: the job, and this process's rank in it.
    """

    def __init__(self, core: Any, topology: Topology) -> None:
        addresses = [worker.address.rpartition(":")[0] for worker in topology.workers]
        self._core = core
        self._records: dict[bool, dict[str, Any]] = {}  # whether it is a notice
        self._lock = threading.Lock()  # an exchange and a notice may end at the same time
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
        self._show({})

    def on_exchange_begin(self, awaited: Awaited) -> None:
        """Shows the exchange, or the notice, which is in progress."""
        self._show({awaited.is_notice: _record(awaited)})

    def on_exchange_end(self, awaited: Awaited, failed: bool) -> None:
        """Shows that the exchange has ended, or that the notice has come."""
        ended = {"ended_ns": time.monotonic_ns(), "failed": failed}
        self._show({awaited.is_notice: _record(awaited) | ended})

    def on_stall(self, message: str) -> None:
        """Has the flight log written, with the message."""
        is_waiting = any(not one["ended_ns"] for one in [*self._records.values()])
        kind = b"stall" if is_waiting else b"waited"
        self._core.tfd_flight_ask(kind, NAME, message.encode())

    def show(self) -> None:
        """Tells the core again, after it has forgotten."""
        self._show({})

    def _show(self, changed: dict[bool, dict[str, Any]]) -> None:
        with self._lock:
            self._records |= changed
            records = sorted(self._records.values(), key=lambda one: one["begun_ns"])
            shown = json.dumps(self._group | {"records": records})
            self._core.tfd_flight_set_session(shown.encode())


def _record(awaited: Awaited) -> dict[str, Any]:
    return {
        # Nothing that came before is missing: of exchanges the last one tells all, of notices, too.
        "number": 1,
        "sequence": awaited.sequence,
        "kind": "receive" if awaited.is_notice else "exchange",
        "what": awaited.what,
        "name": awaited.tag,
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
        "peer": 0 if awaited.is_notice else -1,
        "bytes": 0,
        "algorithm": "",
        "enqueued_ns": awaited.since_ns,
        "begun_ns": awaited.since_ns,
        "last_arrived_ns": 0,
        "ended_ns": 0,
        "between_begun_ns": 0,
        "between_ended_ns": 0,
        "coding_ns": 0,
        "last": -1,
        "arrivals_ns": [],
        "failed": False,
    }
