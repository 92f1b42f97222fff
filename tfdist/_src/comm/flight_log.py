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

    The log shows an exchange like a collective, and a notice like a message from rank 0.

    Python reports the beginning and the end of each wait to the core; the core does not query
    Python. So it can write the log even while a thread holds Python's global interpreter lock.

    Args:
        core: the native library.
        topology: the job, and this process's rank in it.
    """

    def __init__(self, core: Any, topology: Topology) -> None:
        addresses = [worker.address.rpartition(":")[0] for worker in topology.workers]
        self._core = core
        self._records: dict[bool, dict[str, Any]] = {}  # by `PendingWait.is_notice`
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
        """Reports the records to the core again, after the core has dropped them."""
        self._show({})

    def _show(self, changed: dict[bool, dict[str, Any]]) -> None:
        with self._lock:
            self._records |= changed
            records = sorted(self._records.values(), key=lambda one: one["begun_ns"])
            shown = json.dumps(self._group | {"records": records})
            self._core.tfd_flight_set_session(shown.encode())


def _record(awaited: PendingWait) -> dict[str, Any]:
    return {
        # The last exchange implies all earlier exchanges, and the last notice all earlier notices.
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
_session: Session | None = None  # the session that the log shows
_exchanges: ExchangeLog | None = None  # reports the session's exchanges to the core
_folder = Path()
# The values that training steps communicate, by the names of their models; the newest is last.
_steps: dict[str, dict[str, Any]] = {}
_MAX_MODELS = 4
# The reason why no log is written; "" if one is.
_none_because = (
    "a log begins with the first native collective, and this process has not used any (`tfdist "
    "doctor` shows whether it can)"
)


def survive_signal() -> None:
    """Makes SIGUSR1 print why no flight log is written, instead of ending this process.

    Does nothing if the program has its own handler, or outside the main thread, where Python
    accepts no handlers. After a successful `start`, the handler remains, but prints nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    if signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL:
        signal.signal(signal.SIGUSR1, _on_signal)
        # Restart interrupted system calls: not all libraries expect calls to be interrupted.
        signal.siginterrupt(signal.SIGUSR1, False)


def _on_signal(number: int, frame: FrameType | None) -> None:
    if _none_because:
        logger.warning(f"SIGUSR1 writes no flight log: {_none_because}.")


def start(session: Session, options: Options) -> None:
    """Makes the core write a flight log on errors, stalls and SIGUSR1; later calls do nothing.

    Without `options.flight_dir`, no log is written. If the directory is not writable, a line is
    logged, and training continues without a flight log.

    Args:
        session: the job's control connections; the log shows its exchanges.
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
    """Continues the log with another session, in the file of this process's rank in that session.

    The existing file remains unchanged until another process takes over its rank. Does nothing if
    no log is written.
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
    """Adds to the log which values a training step communicates, even if the log starts later.

    Replaces an earlier step of a model with the same name. If anything has changed, this also drops
    the reasons for which the log was written so far.

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
    """Supplies the stacks of all threads whenever the core asks for them; waits without the GIL.

    If the reason is a stall, this also informs all workers. The core informs only the workers that
    it waits for, but other workers may have caused the delay, as in a pipeline.
    """
    wanted = core.tfd_flight_stacks_wanted()
    while True:
        os.read(wanted, 8)
        core.tfd_flight_give_stacks(_stacks())
        message = core.tfd_flight_stalled().decode(errors="replace")
        if message and _session is not None:
            _session.stalled(message)


def _stacks() -> bytes:
    # Use a file in memory, because the disk may be full.
    file = os.memfd_create("tfdist-stacks")
    try:
        faulthandler.dump_traceback(file, all_threads=True)
        return os.pread(file, os.fstat(file).st_size, 0)
    finally:
        os.close(file)
