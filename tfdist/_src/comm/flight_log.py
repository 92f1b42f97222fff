"""The flight log of this process, written by the core."""

import faulthandler
import json
import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any

from tfdist._src import native
from tfdist._src.cluster import Session, Topology
from tfdist._src.cluster.session.shared_state import PendingWait
from tfdist._src.log import logger
from tfdist._src.options import Options

NAME = b"session"


class ExchangeLog:
    """Reports the last exchange and notice to the core, and requests the flight log on a stall.

    An exchange is like a collective, and a notice like a message that rank 0 sends.

    The core receives a report at the beginning and at the end instead of querying, so that it can
    write the log even while a thread keeps Python's lock.

    Args:
        core: the native library.
        topology: the job, and this process's rank in it.
    """

    def __init__(self, core: Any, topology: Topology) -> None:
        addresses = [worker.address.rpartition(":")[0] for worker in topology.workers]
        self._core = core
        self._records: dict[bool, dict[str, Any]] = {}  # by whether it is a notice
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

    def on_exchange_begin(self, awaited: PendingWait) -> None:
        """Reports that the exchange or the notice is in progress."""
        self._show({awaited.is_notice: _record(awaited)})

    def on_exchange_end(self, awaited: PendingWait, failed: bool) -> None:
        """Reports that the exchange has ended, or that the notice has arrived."""
        ended = {"ended_ns": time.monotonic_ns(), "failed": failed}
        self._show({awaited.is_notice: _record(awaited) | ended})

    def on_stall(self, message: str) -> None:
        """Makes the core write the flight log, with the message."""
        is_waiting = any(not one["ended_ns"] for one in [*self._records.values()])
        kind = b"stall" if is_waiting else b"waited"
        self._core.tfd_flight_ask(kind, NAME, message.encode())

    def show(self) -> None:
        """Reports the records to the core again, after it has forgotten them."""
        self._show({})

    def _show(self, changed: dict[bool, dict[str, Any]]) -> None:
        with self._lock:
            self._records |= changed
            records = sorted(self._records.values(), key=lambda one: one["begun_ns"])
            shown = json.dumps(self._group | {"records": records})
            self._core.tfd_flight_set_session(shown.encode())


def _record(awaited: PendingWait) -> dict[str, Any]:
    return {
        # The last record implies all earlier ones, for exchanges as for notices.
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


_lock = threading.Lock()
_started = False
_session: Session | None = None  # whose exchanges the log shows
_exchanges: ExchangeLog | None = None  # reports the session's exchanges to the core
_folder = Path()
# The values that training steps communicate, by the names of their models; the newest is last.
_steps: dict[str, dict[str, Any]] = {}
_MAX_MODELS = 4
# Why there is no log; "" if there is one.
_none_because = (
    "a log begins with the first native collective, and this process has not used any (`tfdist "
    "doctor` shows whether it can)"
)


def survive_signal() -> None:
    """Makes SIGUSR1 print why no flight log is written, instead of ending this process.

    Does nothing if the program has its own handler, or outside the main thread, where Python
    accepts no handlers. `start` keeps the handler, which is then silent.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    if signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL:
        signal.signal(signal.SIGUSR1, _on_signal)
        # Not all calls of other libraries are prepared to be interrupted.
        signal.siginterrupt(signal.SIGUSR1, False)


def _on_signal(number: int, frame: FrameType | None) -> None:
    if _none_because:
        logger.warning(f"SIGUSR1 writes no flight log: {_none_because}.")


def start(session: Session, options: Options) -> None:
    """Makes the core write a flight log on errors, stalls and SIGUSR1; the first call counts.

    Without `options.flight_dir`, no log is written. If the directory cannot be written, one line
    reports this, and training continues.

    Args:
        session: the job's control connections, whose exchanges the log shows.
        options: the settings.
    """
    global _started, _session, _exchanges, _folder, _none_because
    topology = session.topology
    if topology.size == 1:
        return  # A worker that has not joined the others must not overwrite another worker's log.
    with _lock:
        if _started:
            return
        if not options.flight_dir:
            _none_because = "TFDIST_FLIGHT_DIR is not set. Set it, or start the job with tfdist run"
            return
        _started = True
    folder = Path(options.flight_dir).absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise PermissionError(f"{folder} is not writable")
    except OSError as error:
        _none_because = f"{error}. Set TFDIST_FLIGHT_DIR to another directory"
        logger.warning(f"no flight log will be written: {_none_because}.")
        return
    core = native.load().library
    path, header = _place(folder, topology)
    if core.tfd_flight_start(path, header, signal.SIGUSR1):
        _none_because = core.tfd_error().decode(errors="replace").removesuffix(".")
        logger.warning(f"no flight log will be written: {_none_because}.")
        return
    _exchanges = ExchangeLog(core, topology)
    _none_because, _folder, _session = "", folder, session
    session.record_exchanges(_exchanges)
    serve = threading.Thread(target=_serve, args=(core,), name="tfdist-stacks", daemon=True)
    serve.start()


def move(session: Session, options: Options) -> None:
    """Continues with another session, in the file of this process's rank there.

    The existing file remains as it is until another process takes over the rank. Does nothing if
    there is no log.
    """
    global _session, _exchanges, _folder
    if _session is None:
        return
    with _lock:
        _session, _folder = session, Path(options.flight_dir).absolute()
        core = native.load().library
        core.tfd_flight_move(*_place(_folder, session.topology))
        _exchanges = ExchangeLog(core, session.topology)
    session.record_exchanges(_exchanges)


def note_step(model: str, step: dict[str, Any]) -> None:
    """Adds the values that a training step communicates to the log, even if it starts later.

    Replaces an earlier step of a model with the same name. If anything has changed, the log forgets
    why it was last written.

    Args:
        model: the model's name.
        step: the members of a JSON object.
    """
    step = json.loads(json.dumps(step))  # Raises early if something cannot be written.
    with _lock:
        if _steps.get(model) == step:
            return
        _steps.pop(model, None)
        _steps[model] = step
        if len(_steps) > _MAX_MODELS:
            del _steps[next(iter(_steps))]
        if _session is not None and _exchanges is not None:
            native.load().library.tfd_flight_move(*_place(_folder, _session.topology))
            _exchanges.show()


def _place(folder: Path, topology: Topology) -> tuple[bytes, bytes]:
    """The path of the log, and the members of its JSON object that describe this process."""
    header = json.dumps(_header(topology))[1:-1]
    return os.fsencode(folder / f"flight-rank{topology.rank}.json"), header.encode()


def _header(topology: Topology) -> dict[str, Any]:
    return {
        "rank": topology.rank,
        "size": topology.size,
        "generation": topology.generation,
        "worker": str(topology.me),
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "program": sys.argv[0] if sys.argv else "",
        "step_communication": [{"model": name, **step} for name, step in _steps.items()],
    }


def _serve(core: Any) -> None:
    """Waits, without Python's lock, until the core asks for the stacks of all threads.

    If the reason is a stall, all workers are informed. The core informs only the workers that it
    waits for, but others may be the cause of their delay, as in a pipeline.
    """
    wanted = core.tfd_flight_stacks_wanted()
    while True:
        os.read(wanted, 8)
        core.tfd_flight_give_stacks(_stacks())
        message = core.tfd_flight_stalled().decode(errors="replace")
        if message and _session is not None:
            _session.stalled(message)


def _stacks() -> bytes:
    # In memory, because the disk may be full.
    file = os.memfd_create("tfdist-stacks")
    try:
        faulthandler.dump_traceback(file, all_threads=True)
        return os.pread(file, os.fstat(file).st_size, 0)
    finally:
        os.close(file)
