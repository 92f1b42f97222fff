"""Controls the flight log of this process, a file that the native core writes."""

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
    """Tells the core about the session's exchanges and notices, for the flight log.

    The log shows the last exchange in the same form as a collective, and the last notice in the
    same form as a message from rank 0. This object also makes the core write the log if the session
    stalls.

    Python tells the core about the beginning and the end of each wait. The core never asks Python,
    so the core can write the log even while another thread holds Python's global interpreter lock.

    Args:
        core: the loaded library of the native core.
        topology: the workers of the job, and this process's rank among them.
    """

    def __init__(self, core: Any, topology: Topology) -> None:
        addresses = [worker.address.rpartition(":")[0] for worker in topology.workers]
        self._core = core
        self._records: dict[bool, dict[str, Any]] = {}  # keys: `PendingWait.is_notice`
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
        """Tells the core that this process has begun to wait for an exchange or for a notice."""
        self._show({awaited.is_notice: _record(awaited)})

    def on_exchange_end(self, awaited: PendingWait, failed: bool) -> None:
        """Tells the core that an exchange has ended, or that a notice has arrived."""
        ended = {"ended_ns": time.monotonic_ns(), "failed": failed}
        self._show({awaited.is_notice: _record(awaited) | ended})

    def on_stall(self, message: str) -> None:
        """Makes the core write the flight log, with `message` as the reason."""
        is_waiting = any(not one["ended_ns"] for one in [*self._records.values()])
        kind = b"stall" if is_waiting else b"waited"
        self._core.tfd_flight_ask(kind, NAME, message.encode())

    def show(self) -> None:
        """Passes the records to the core again, after the core has dropped them."""
        self._show({})

    def _show(self, changed: dict[bool, dict[str, Any]]) -> None:
        with self._lock:
            self._records |= changed
            records = sorted(self._records.values(), key=lambda one: one["begun_ns"])
            shown = json.dumps(self._group | {"records": records})
            self._core.tfd_flight_set_session(shown.encode())


def _record(awaited: PendingWait) -> dict[str, Any]:
    return {
        # Always 1, because only the last exchange and the last notice are recorded.
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
_session: Session | None = None  # the session with the exchanges that the log shows
_exchanges: ExchangeLog | None = None  # tells the core about the exchanges of `_session`
_folder = Path()
# For each model name, a description of the values that the model's training step communicates. The
# newest entry is last.
_steps: dict[str, dict[str, Any]] = {}
_MAX_MODELS = 4
# The reason why this process writes no flight log; "" if it writes one.
_none_because = (
    "a log begins with the first native collective, and this process has not used any (`tfdist "
    "doctor` shows whether it can)"
)


def survive_signal() -> None:
    """Installs a handler for SIGUSR1, because the signal would otherwise end this process.

    Until `start` succeeds, the handler logs why this process writes no flight log. This function
    does nothing if the program has already installed a handler. It also does nothing outside the
    main thread, where Python cannot install handlers.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    if signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL:
        signal.signal(signal.SIGUSR1, _on_signal)
        # Restart system calls that the signal interrupts, because some libraries do not do so
        # themselves.
        signal.siginterrupt(signal.SIGUSR1, False)


def _on_signal(number: int, frame: FrameType | None) -> None:
    if _none_because:
        logger.warning(f"SIGUSR1 writes no flight log: {_none_because}.")


def start(session: Session, options: Options) -> None:
    """Makes the core write a flight log on errors, stalls and SIGUSR1.

    Once this process has tried to open a flight log, further calls have no effect. If
    `options.flight_dir` is empty, no flight log is written. If the directory is not writable, a
    warning is logged, and training continues without a flight log.

    Args:
        session: the control connections of the job. The flight log shows their exchanges.
        options: the settings.
    """
    global _started, _session, _exchanges, _folder, _none_because
    topology = session.topology
    if topology.size == 1:
        # A worker that has not joined the others yet has rank 0, and would overwrite the log of
        # rank 0.
        return
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
    """Continues the flight log after this process has joined another session.

    The log continues in the file for this process's new rank. The file for the previous rank
    remains until another process with that rank overwrites it. This function has no effect if no
    log is written.
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
    """Describes in the flight log which values a training step communicates.

    The log may also start after this call. The description replaces an earlier one for the same
    model name. If the description has changed, the log also forgets the reasons for which it was
    written so far.

    Args:
        model: the name of the model that the step trains.
        step: the description, as the members of a JSON object.
    """
    step = json.loads(json.dumps(step))  # Raises an error here if `step` cannot be written as JSON.
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
    """Returns the path of the log, and a text with the JSON members that describe this process."""
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
    """Passes the stacks of all threads to the core whenever the core requests them.

    If the core requests the stacks because of a stall, this function also informs all workers about
    the stall, so that they write their flight logs. The core itself informs only the workers that
    it waits for. In a pipeline, for example, another worker may be the cause of the delay.
    """
    wanted = core.tfd_flight_stacks_wanted()
    while True:
        os.read(wanted, 8)
        core.tfd_flight_give_stacks(_stacks())
        message = core.tfd_flight_stalled().decode(errors="replace")
        if message and _session is not None:
            _session.stalled(message)


def _stacks() -> bytes:
    # Use a file in memory, since the disk may be full.
    file = os.memfd_create("tfdist-stacks")
    try:
        faulthandler.dump_traceback(file, all_threads=True)
        return os.pread(file, os.fstat(file).st_size, 0)
    finally:
        os.close(file)
