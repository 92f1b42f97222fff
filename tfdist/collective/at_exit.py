"""Leaves all groups when the process exits; the other ranks would report it as lost otherwise."""

from __future__ import annotations

import atexit
from typing import Protocol

from tfdist import native
from tfdist.cluster.session import exit_reason


class Open(Protocol):
    """An open communicator of the native core."""

    def exit_because_of(self, failure: str) -> None: ...


_open: list[Open] = []


def add(communicator: Open) -> None:
    """Has a communicator closed at exit."""
    _open.append(communicator)
    # Once more, so that it is called before the session leaves.
    atexit.unregister(_leave)
    atexit.register(_leave)


def discard(communicator: Open) -> None:
    """Removes a communicator that has been closed; calling this again has no effect."""
    if communicator in _open:
        _open.remove(communicator)


def _leave() -> None:
    """Closes all communicators, and reports the exception that terminates this process, if any."""
    failure = exit_reason.failure()
    for communicator in list(_open):
        if failure:
            communicator.exit_because_of(failure)
    if _open:
        native.load().library.tfd_close_all()
