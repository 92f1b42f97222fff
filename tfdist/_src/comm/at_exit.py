"""Leaves all groups when the process exits; the other ranks would report it as lost otherwise."""

from __future__ import annotations

import atexit
from collections.abc import Callable

from tfdist._src import native
from tfdist._src.cluster.session import exit_reason

# More than the core gives Python for its threads' stacks.
_FLIGHT_LOG_SECONDS = 3.0
_open: dict[int, tuple[Callable[[str], None], str]] = {}


def add(number: int, abort: Callable[[str], None], rank: str) -> None:
    """Has a communicator of the native core closed at exit.

    Args:
        number: the core's number of the communicator.
        abort: fails its operations on all ranks, with a message.
        rank: what messages call this process's rank.
    """
    _open[number] = abort, rank
    # Once more, so that it is called before the session leaves.
    atexit.unregister(_leave)
    atexit.register(_leave)


def discard(number: int) -> None:
    """Removes a communicator that has been closed; calling this again has no effect."""
    _open.pop(number, None)


def _leave() -> None:
    """Closes all communicators, and reports the exception that terminates this process, if any."""
    if failure := exit_reason.failure():
        for abort, rank in list(_open.values()):
            abort(f"{rank} failed: {failure}")
    if _open:
        core = native.load().library
        # While there is something to write down.
        core.tfd_flight_flush(_FLIGHT_LOG_SECONDS)
        core.tfd_close_all()
