"""The communicators of this process by name, and graphs that depend on the group.

A graph outlives a change of the group. What tfdist puts into graphs is read when they run
(`place` of a communicator). Whatever else is read while a graph is traced may become a constant of
it, so reading it is noted here: such graphs must be traced again when the group has changed.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

from tfdist._src.cluster import Session
from tfdist._src.comm.communicator_interface import NONE, Alone, Traffic

_known = False
_here = threading.local()


def note_read() -> None:
    """Records that something that may change is read; only while a graph is traced."""
    global _known
    if not (_known or tf.executing_eagerly() or getattr(_here, "unnoted", False)):
        _known = True


def note_stale() -> None:
    """Records that graphs know something that has changed."""
    global _known
    _known = True


@contextlib.contextmanager
def unnoted() -> Iterator[None]:
    """What is read in this context enters no graph, or none that lasts."""
    outer, _here.unnoted = getattr(_here, "unnoted", False), True
    try:
        yield
    finally:
        _here.unnoted = outer


def know_group() -> bool:
    """Whether something has been read while a graph was traced, since `forget`."""
    return _known


def forget() -> None:
    """Declares that all graphs will be traced again before they run."""
    global _known
    _known = False


# What flight logs and the live view call the exchanges and the notices of the session.
RESERVED = ("session", "notices")
_ALONE = Alone()
_communicators: dict[str, Any] = {}
_lock = threading.Lock()
_closed = NONE


def put(name: str, communicator: Any) -> None:
    """Registers a communicator under a name that no open one has."""
    _communicators[name] = communicator


def check_free(session: Session, name: str, members: Sequence[int]) -> None:
    """Checks that no open communicator has a name; called by all ranks of the session.

    Args:
        session: the job's control connections.
        name: the name of the new communicator.
        members: the job's ranks in this process's group; empty for a process in none.

    Raises:
        ValueError: a process of a group has an open communicator of this name, or it is reserved;
            the same error on all ranks.
    """
    check_unreserved(name)
    # The communicator of a single process may be replaced.
    taken = bool(members) and not isinstance(_communicators.get(name, _ALONE), Alone)
    for rank, answer in enumerate(session.exchange(f"communicator {name!r}", b"%d" % taken)):
        if answer == b"1":
            where = session.topology.workers[rank] if session.topology.workers else "this process"
            raise _taken(name, where)


def check_unreserved(name: str) -> None:
    """Checks that a name is not one of tfdist's own.

    Raises:
        ValueError: it is.
    """
    if name in RESERVED:
        raise ValueError(
            f"{' and '.join(map(repr, RESERVED))} are what tfdist calls its own connections in "
            f"flight logs. Received: a communicator named {name!r}. Choose another name."
        )


def check_new(name: str) -> None:
    """Checks that this process has no communicator of a name.

    Raises:
        ValueError: it has.
    """
    if name in _communicators:
        raise _taken(name, "this process")


def _taken(name: str, where: Any) -> ValueError:
    return ValueError(
        f"The open communicators of a process must have different names. Received: {name!r}, which "
        f"{where} already uses. Close that communicator first, or choose another name."
    )


def get(name: str) -> Any:
    """The communicator of a name.

    Raises:
        ValueError: no communicator has this name.
    """
    if name not in _communicators:
        known = ", ".join(map(repr, _communicators)) or "none"
        raise ValueError(
            f"There is no communicator {name!r} in this process; existing ones: {known}. Create a "
            "tfdist strategy with the native collectives, whose communicator is 'workers', or "
            "split a communicator."
        )
    return _communicators[name]


def remove(name: str, communicator: Any) -> None:
    """Removes a communicator, unless another one has replaced it; keeps its traffic."""
    global _closed
    with _lock:
        if _communicators.get(name) is communicator:
            with contextlib.suppress(RuntimeError):  # The core has already left all groups.
                _closed = _sum([_closed, _traffic_of(communicator)])
            del _communicators[name]


def forget_alone(name: str) -> None:
    """Removes the communicator of a single process that has joined others."""
    if isinstance(_communicators.get(name), Alone):
        del _communicators[name]


def every() -> list[Any]:
    """All registered communicators."""
    return list(_communicators.values())


def traffic() -> Traffic:
    """The traffic of all communicators, those that are closed included."""
    with _lock:
        return _sum([_closed, *map(_traffic_of, every())])


def _traffic_of(communicator: Any) -> Traffic:
    return NONE if isinstance(communicator, Alone) else communicator.traffic()


def _sum(parts: Sequence[Traffic]) -> Traffic:
    # Callbacks come here in every step, and `dataclasses.astuple` would copy deeply.
    return Traffic(
        sum(part.collectives for part in parts),
        sum(part.shared_bytes for part in parts),
        sum(part.sent_bytes for part in parts),
        sum(part.received_bytes for part in parts),
        sum(part.device_bytes for part in parts),
    )
