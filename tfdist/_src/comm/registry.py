"""Registers the communicators of this process by name, and tracks graphs that depend on the group.

A graph can be used again after the workers of the group have changed, if it does not contain the
rank or the number of workers as a constant. The operations that tfdist adds to graphs read these
values each time the graph runs (see `Communicator.place`). If other code reads `rank` or `size` of
a communicator while a graph is traced, the value may become a constant of the graph. This module
records such reads. If there were any, all graphs must be traced again when the group changes.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

from tfdist._src.cluster import Session
from tfdist._src.comm.communicator_interface import NONE, Alone, NativeCommunicator, Traffic
from tfdist._src.native.api import Link
from tfdist.errors import ClusterError

_known = False


class _TraceScope(threading.local):
    """Settings for the graph that a thread is tracing.

    Attributes:
        overlaps: whether collectives added to the graph run at the same time as other operations of
            the step.
        is_unnoted: whether reads of the rank and of the number of workers are ignored instead of
            recorded.
    """

    overlaps = False
    is_unnoted = False


scope = _TraceScope()


def note_read() -> None:
    """Records that code reads the rank or the number of workers while it traces a graph.

    Reads in eager execution are not recorded.
    """
    global _known
    if not (_known or tf.executing_eagerly() or scope.is_unnoted):
        _known = True


def note_stale() -> None:
    """Records that existing graphs contain an outdated rank or number of workers."""
    global _known
    _known = True


@contextlib.contextmanager
def unnoted() -> Iterator[None]:
    """Ignores reads of the rank and of the number of workers within this context.

    Use this context only if no graph keeps the values after the group has changed.
    """
    outer, scope.is_unnoted = scope.is_unnoted, True
    try:
        yield
    finally:
        scope.is_unnoted = outer


def know_group() -> bool:
    """Whether existing graphs may contain the rank or the number of workers as a constant."""
    return _known


def forget() -> None:
    """Forgets the recorded reads, because all graphs will be traced again before they run."""
    global _known
    _known = False


# Flight logs and the live view show the session's exchanges and notices under these names.
RESERVED = ("session", "notices")
_ALONE = Alone()
_communicators: dict[str, Any] = {}
_lock = threading.Lock()
_closed = NONE


def put(name: str, communicator: Any) -> None:
    """Registers an open communicator. No other open communicator may have the same name."""
    _communicators[name] = communicator


def check_free(session: Session, name: str, members: Sequence[int]) -> None:
    """Checks that no member of a new group has an open communicator with the group's name.

    All ranks of the session must call this function together.

    Args:
        session: the control connections of the job.
        name: the name of the new communicator.
        members: the members of this process's new group, as ranks in the job; empty if this process
            belongs to no new group.

    Raises:
        ValueError: a member of a new group has an open communicator with this name, or the name is
            reserved. All ranks raise the same error.
    """
    check_unreserved(name)
    # A communicator that consists of this process alone may be replaced.
    taken = bool(members) and not isinstance(_communicators.get(name, _ALONE), Alone)
    for rank, answer in enumerate(session.exchange(f"communicator {name!r}", b"%d" % taken)):
        if answer == b"1":
            where = session.topology.workers[rank] if session.topology.workers else "this process"
            raise _taken(name, where)


def check_unreserved(name: str) -> None:
    """Checks that a name is not reserved for tfdist's own connections.

    Raises:
        ValueError: the name is reserved.
    """
    if name in RESERVED:
        raise ValueError(
            f"{' and '.join(map(repr, RESERVED))} are the names of tfdist's own connections in "
            f"flight logs. Received: a communicator named {name!r}. Choose another name."
        )


def check_new(name: str) -> None:
    """Checks that this process has no communicator with this name.

    Raises:
        ValueError: a communicator with this name exists.
    """
    if name in _communicators:
        raise _taken(name, "this process")


def _taken(name: str, where: Any) -> ValueError:
    return ValueError(
        f"The open communicators of a process must have different names. Received: {name!r}, which "
        f"{where} already uses. Close that communicator first, or choose another name."
    )


def get(name: str) -> Any:
    """Returns the communicator with this name.

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
    """Removes a communicator, unless another communicator already has its name.

    The function `traffic` continues to count the traffic of the removed communicator.
    """
    global _closed
    with _lock:
        if _communicators.get(name) is communicator:
            # At exit, the core may have closed the communicator already, and has no counters for it
            # then.
            with contextlib.suppress(RuntimeError):
                _closed = _sum([_closed, _traffic_of(communicator)])
            del _communicators[name]


def forget_alone(name: str) -> None:
    """Removes a communicator that consists of this process alone.

    Called when this process has joined other workers.
    """
    if isinstance(_communicators.get(name), Alone):
        del _communicators[name]


def every() -> list[Any]:
    """Returns all registered communicators."""
    return list(_communicators.values())


def traffic() -> Traffic:
    """Returns the total traffic of all communicators, including closed ones."""
    with _lock:
        return _sum([_closed, *map(_traffic_of, every())])


def _traffic_of(communicator: Any) -> Traffic:
    return NONE if isinstance(communicator, Alone) else communicator.traffic()


def _sum(parts: Sequence[Traffic]) -> Traffic:
    # Callbacks call this function in every step. `dataclasses.astuple` would be slower, because it
    # makes deep copies.
    return Traffic(
        sum(part.collectives for part in parts),
        sum(part.shared_bytes for part in parts),
        sum(part.sent_bytes for part in parts),
        sum(part.received_bytes for part in parts),
        sum(part.device_bytes for part in parts),
    )


class OneRank(Alone, NativeCommunicator):
    """A communicator with a single rank, for a program that runs in one process.

    `tfdist.collective.communicator` returns an object of this class if there is only one process.
    The object also has the methods of `CoreCommunicator` that describe a group, so that the same
    script works with any number of processes.

    Args:
        name: the group's name.
    """

    hosts = (0,)

    def __init__(self, name: str) -> None:
        self.name = name
        self._failure: str | None = None

    def split(self, name: str, members: Sequence[int]) -> OneRank | None:
        """Creates another communicator with a single rank; see `NativeCommunicator.split`.

        Args:
            name: the name of the new group.
            members: `[0]`, or an empty sequence if this process belongs to no new group.

        Raises:
            ClusterError: `members` contains a rank other than 0.
            ValueError: a communicator with this name exists.
        """
        check_unreserved(name)
        if not len(members):
            return None
        if list(members) != [0]:
            raise ClusterError(
                f"mesh {name!r}: members must be distinct ranks from 0 to 0. Received: "
                f"{list(members)}. List each rank of the group once."
            )
        check_new(name)
        part = OneRank(name)
        put(name, part)
        return part

    def traffic(self) -> Traffic:
        """Returns traffic counters that are all zero."""
        return NONE

    def links(self) -> list[Link]:
        """Returns connection statistics for this rank that are all zero."""
        return list((Link * 1)())

    def abort(self, message: str) -> None:
        """Makes all later operations fail with this message."""
        self._failure = f"{message.rstrip('.')}."

    def close(self) -> None:
        """Leaves the group; later calls have no effect."""
        remove(self.name, self)

    def check(self) -> None:
        """Checks that the communicator has not been aborted.

        Raises:
            tf.errors.UnavailableError: `abort` has been called.
        """
        if self._failure is not None:
            raise tf.errors.UnavailableError(None, None, self._failure)

    def all_to_all(self, tensor: tf.Tensor, rows: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns all rows and their number, because this rank is the only receiver.

        Raises:
            tf.errors.InvalidArgumentError: `rows` is not a vector with one element, the tensor's
                number of rows.
        """
        count = tf.shape(tensor, tf.int64)[:1]
        wrong = (
            "all_to_all needs a number of rows for each of 1 ranks, with the tensor's number of "
            "rows as their sum."
        )
        given = tf.reshape(rows, [-1])
        same = tf.equal(tf.size(given), 1) & tf.reduce_all(tf.equal(given[:1], count))
        if tf.executing_eagerly():
            if not same:
                found = " ".join(map(str, given.numpy().tolist()))
                shape = f"[{','.join(map(str, tensor.shape))}]"
                raise invalid(f"{wrong} Received: rows {found} for a tensor of shape {shape}.")
            return tensor, rows
        found = tf.strings.format(
            "Received: rows {} for a tensor of shape {}.", (given, count), summarize=-1
        )
        checked = tf.debugging.Assert(same, [tf.strings.join([wrong, found], " ")])
        with tf.control_dependencies([checked]):
            return tf.identity(tensor), tf.identity(rows)


def invalid(message: str) -> Exception:
    """Creates the error that a collective raises for an invalid argument."""
    error: Exception = tf.errors.InvalidArgumentError(None, None, message)
    return error
