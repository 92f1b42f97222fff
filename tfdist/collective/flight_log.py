"""The flight log of this process, which the core writes: where, about whom, and Python's stacks."""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import socket
import sys
import threading
from pathlib import Path
from typing import Any

from tfdist import native
from tfdist.cluster import Session, Topology
from tfdist.cluster.net.wait_messages import say
from tfdist.collective.exchange_log import ExchangeLog
from tfdist.options import Options

_lock = threading.Lock()
_started = False


def start(session: Session, options: Options) -> None:
    """Has the core write a flight log on errors, on stalls and on SIGUSR1; the first call counts.

    Without `options.flight_dir` none is written. A directory that cannot be written is reported in
    one line, and training goes on.

    Args:
        session: the job's control connections, whose exchanges the log shows.
        options: the settings.
    """
    global _started
    topology = session.topology
    with _lock:
        if _started or not options.flight_dir:
            return
        _started = True
    folder = Path(options.flight_dir).absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise PermissionError(f"{folder} is not writable")
    except OSError as error:
        say(
            f"tfdist: there will be no flight log: {error}. Set TFDIST_FLIGHT_DIR to another "
            "directory."
        )
        return
    core = native.load().library
    path = folder / f"flight-rank{topology.rank}.json"
    header = json.dumps(_header(topology))[1:-1]
    if core.tfd_flight_start(os.fsencode(path), header.encode(), signal.SIGUSR1):
        reason = core.tfd_error().decode(errors="replace")
        say(f"tfdist: there will be no flight log: {reason}")
        return
    session.observe(ExchangeLog(core, topology))
    threading.Thread(target=_give_stacks, args=(core,), name="tfdist-stacks", daemon=True).start()


def _header(topology: Topology) -> dict[str, Any]:
    return {
        "rank": topology.rank,
        "size": topology.size,
        "worker": str(topology.me),
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "program": sys.argv[0] if sys.argv else "",
    }


def _give_stacks(core: Any) -> None:
    """Waits, without Python's lock, until the core asks for the stacks of all threads."""
    wanted = core.tfd_flight_stacks_wanted()
    while True:
        os.read(wanted, 8)
        core.tfd_flight_give_stacks(_stacks())


def _stacks() -> bytes:
    # In memory, since the disk may be full.
    file = os.memfd_create("tfdist-stacks")
    try:
        faulthandler.dump_traceback(file, all_threads=True)
        return os.pread(file, os.fstat(file).st_size, 0)
    finally:
        os.close(file)
