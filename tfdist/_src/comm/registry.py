"""The communicators of this process by name, and graphs that depend on the group.

A graph may be used again after the group has changed. tfdist's own operations in graphs read the
rank and the number of workers whenever a graph runs (`place` of a communicator). If other code
reads them while a graph is traced, they may become constants of the graph. Such reads are recorded
here; after one, all graphs must be traced again when the group changes.
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
    """The scope of the code that a thread traces.

    Attributes:
        overlaps: whether collectives that are added to a graph overlap with the step.
        is_unnoted: whether reads of the rank or the number of workers are not recorded.
    """

    overlaps = False
    is_unnoted = False


scope = _TraceScope()


def note_read() -> None:
    """Records that the graph being traced, if any, reads the rank or the number of workers."""
    global _known
    if not (_known or tf.executing_eagerly() or scope.is_unnoted):
        _known = True


def note_stale() -> None:
    """Records that graphs contain a rank or a number of workers that has changed."""
    global _known
    _known = True


@contextlib.contextmanager
def unnoted() -> Iterator[None]:
    """Does not record reads in this context: no graph keeps their values when the group changes."""
    outer, scope.is_unnoted = scope.is_unnoted, True
    try:
        yield
    finally:
        scope.is_unnoted = outer


def know_group() -> bool:
    """Whether graphs may contain a rank or a number of workers, as recorded since `forget`."""
    return _known


def forget() -> None:
    """Declares that all graphs will be traced again before they run."""
    global _known
    _known = False


# The names of the session's exchanges and notices in flight logs and the live view.
RESERVED = ("session", "notices")
_ALONE = Alone()
_communicators: dict[str, Any] = {}
_lock = threading.Lock()
_closed = NONE


def put(name: str, communicator: Any) -> None:
    """Registers a communicator under a name that no other open communicator has."""
    _communicators[name] = communicator


def check_free(session: Session, name: str, members: Sequence[int]) -> None:
    """Checks that no member of a new group uses its name yet; called by all ranks of the session.

    Args:
        session: the job's control connections.
        name: the name of the new communicator.
        members: the job's ranks in this process's group; empty if it belongs to no group.

    Raises:
        ValueError: a member of a group has an open communicator with this name, or the name is
            reserved; the same error on all ranks.
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
        ValueError: the name is reserved.
    """
    if name in RESERVED:
        raise ValueError(
            f"{' and '.join(map(repr, RESERVED))} are the names of tfdist's own connections in "
            f"flight logs. Received: a communicator named {name!r}. Choose another name."
        )


def check_new(name: str) -> None:
    """Checks that this process has no communicator with a name.

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
    """The communicator with a name.

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
    """Removes a communicator, unless another one has replaced it.

    `traffic` still includes the traffic of the removed communicator.
    """
    global _closed
    with _lock:
        if _communicators.get(name) is communicator:
            with contextlib.suppress(RuntimeError):  # The core has already left all groups.
                _closed = _sum([_closed, _traffic_of(communicator)])
            del _communicators[name]


def forget_alone(name: str) -> None:
    """Removes the communicator of a single process after that process has joined others."""
    if isinstance(_communicators.get(name), Alone):
        del _communicators[name]


def every() -> list[Any]:
    """All registered communicators."""
    return list(_communicators.values())


def traffic() -> Traffic:
    """The traffic of all communicators, including closed ones."""
    with _lock:
        return _sum([_closed, *map(_traffic_of, every())])


def _traffic_of(communicator: Any) -> Traffic:
    return NONE if isinstance(communicator, Alone) else communicator.traffic()


def _sum(parts: Sequence[Traffic]) -> Traffic:
    # Callbacks call this in every step, and `dataclasses.astuple` would copy deeply.
    return Traffic(
        sum(part.collectives for part in parts),
        sum(part.shared_bytes for part in parts),
        sum(part.sent_bytes for part in parts),
        sum(part.received_bytes for part in parts),
        sum(part.device_bytes for part in parts),
    )


class OneRank(Alone, NativeCommunicator):
    """The result of `tfdist.collective.communicator` in a single process.

    It also has the methods of a `CoreCommunicator` that describe a group, so that a script works
    with any number of processes.

    Args:
        name: the group's name.
    """

    hosts = (0,)

    def __init__(self, name: str) -> None:
        self.name = name
        self._failure: str | None = None

    def split(self, name: str, members: Sequence[int]) -> OneRank | None:
        """Creates a communicator of this rank; see `NativeCommunicator.split`.

        Args:
            name: the name of the new group.
            members: `[0]`, or empty.

        Raises:
            ClusterError: the members include other ranks.
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
        """The traffic, which is zero."""
        return NONE

    def links(self) -> list[Link]:
        """The counts of the connection to this rank, which are zero."""
        return list((Link * 1)())

    def abort(self, message: str) -> None:
        """Fails all later operations with this message."""
        self._failure = f"{message.rstrip('.')}."

    def close(self) -> None:
        """Leaves the group; idempotent."""
        remove(self.name, self)

    def check(self) -> None:
        """Checks that the group can be used.

        Raises:
            tf.errors.UnavailableError: `abort` has been called.
        """
        if self._failure is not None:
            raise tf.errors.UnavailableError(None, None, self._failure)

    def all_to_all(self, tensor: tf.Tensor, rows: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns all rows of the tensor, since all are for this rank, and their number.

        Raises:
            tf.errors.InvalidArgumentError: `rows` is not a vector of the number of rows.
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
    """The error for an argument that a collective rejects."""
    error: Exception = tf.errors.InvalidArgumentError(None, None, message)
    return error
