"""Where a process runs, and whether another one of the same machine is dead (Linux only)."""

from __future__ import annotations

import os
import select
import time
from pathlib import Path

from tfdist._src.cluster.membership.view import Place
from tfdist._src.options import Options

_BOOT = "/proc/sys/kernel/random/boot_id"
_START_FIELD = 22


def here(options: Options, record: str = "") -> Place:
    """The place of this process.

    Args:
        options: `host` sets its workers apart from those of other hosts, which cannot see them;
            `witness` is where its launcher tells others of its death.
        record: the file of its last word.
    """
    pid, boot = os.getpid(), _text(_BOOT)
    machine = f"boot {boot} processes {_namespace()} {options.host}".strip()
    # Without the boot's id, processes of another machine would pass for visible.
    started = (_started(pid) or 0) if boot else 0
    return Place(machine, pid, started, record, options.witness)


def is_visible(other: Place, mine: Place) -> bool:
    """Whether this process can see if another one is alive."""
    return other.machine == mine.machine and bool(other.started)


def is_dead(place: Place, seconds: float = 0.0) -> bool:
    """Whether a process, visible from here, is dead for certain: none of its threads runs.

    Args:
        place: where it runs, or ran.
        seconds: how long to wait for its death, if it is alive.
    """
    try:
        descriptor = os.pidfd_open(place.pid)
    except ProcessLookupError:
        return True
    except OSError:  # out of descriptors, too old a kernel, or now the id of a thread
        if _is_replaced(place):
            return True
        time.sleep(seconds)
        return False
    try:
        # Only now the id cannot be given to another process before it is looked at.
        if _is_replaced(place):
            return True
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        return bool(poll.poll(1000 * seconds))
    finally:
        os.close(descriptor)


def _is_replaced(place: Place) -> bool:
    """Whether the id of a process belongs to another process or thread now."""
    started = _started(place.pid)
    return started is not None and started != place.started


def _started(pid: int) -> int | None:
    """When a process started, in ticks since the machine did; None if that cannot be read."""
    text = _text(f"/proc/{pid}/stat")
    fields = text.rpartition(")")[2].split()  # its name may contain anything
    try:
        return int(fields[_START_FIELD - 3])
    except (IndexError, ValueError):
        return None


def _text(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except (OSError, ValueError):
        return ""


def _namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""
