"""Marks, spans and counters of a step, for the flight recorder and timelines."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from tfdist._src import native
from tfdist._src.comm import tokens
from tfdist._src.internals.tensorflow import get_current_replica_id_as_int
from tfdist._src.native.api import Activity as Counters


def ready(communicator: str, key: str = "", *, stalls: bool = True) -> Any:
    """What a collective needs exists.

    Args:
        communicator: the communicator's name.
        key: the collective's; "" if the step can do nothing more beside the one that runs.
        stalls: whether the step waits for it from now on.

    Returns:
        The operation, for control dependencies.
    """
    # That nothing more can be done is known when all is, but what is ready must be told at once.
    order = _order("ready" if key else "stalls")
    return native.load_ops().tfdist_ready(
        order=order, communicator=communicator, key=key, stalls=stalls
    )


def input_begins() -> Any:
    """The step waits for its input from now on."""
    return native.load_ops().tfdist_input_begins(order=_order("input"))


def input_ends() -> None:
    """The step has got its input."""
    native.load_ops().tfdist_input_ends(order=_order("input"))


def span_begins() -> tf.Tensor:
    """The time, for `span_ends`; zero unless spans are recorded."""
    return native.load_ops().tfdist_span_begins(order=_order("spans"))


def span_ends(begin: tf.Tensor, lane: str, name: str) -> None:
    """A span ends now."""
    native.load_ops().tfdist_span_ends(order=_order("spans"), begin=begin, lane=lane, span=name)


def _order(kind: str) -> tf.Tensor:
    return _resource(kind, get_current_replica_id_as_int())


@functools.cache
def _resource(kind: str, replica: int | None) -> tf.Tensor:
    """What keeps marks of one kind in order, and all others out of their way.

    Each replica has its own: a conditional with a mark holds the resource of the mark, and those of
    two replicas must not wait for each other, since both may contain parts of one collective.
    """
    return tokens.make(str(tf.config.list_logical_devices("CPU")[0].name), tf.float32)


KINDS = (
    "all_reduce",
    "reduce_scatter",
    "all_gather",
    "broadcast",
    "all_to_all",
    "barrier",
    "send",
    "receive",
)
"""The kinds of collectives and messages."""

_NANOSECONDS = 1e-9


@dataclass(frozen=True)
class Activity:
    """Counts since the process started.

    Times are in seconds, and include no time in which the step went on beside its collectives.

    Attributes:
        steps: steps of training, evaluation and prediction that have got their input.
        input: waiting for batches that have come.
        workers: waiting for other workers to join a collective or to send a message.
        network: waiting for the data of a collective or a message to move.
        operations: the collectives and messages that have ended well, by kind.
        bus_bytes: of them, the bytes of all values times the share that each link must carry at
            least, as nccl-tests compute bus bandwidth.
        bus_time: how long they took once all workers had joined.
        input_since: when the wait for the next batch began that still lasts, by
            `time.monotonic()`; None for none.
    """

    steps: int = 0
    input: float = 0.0
    workers: float = 0.0
    network: float = 0.0
    operations: Mapping[str, int] = field(default_factory=dict)
    bus_bytes: float = 0.0
    bus_time: float = 0.0
    input_since: float | None = None

    def since(self, earlier: Activity) -> Activity:
        """The counts between an earlier moment and this one."""
        return Activity(
            self.steps - earlier.steps,
            self.input - earlier.input,
            self.workers - earlier.workers,
            self.network - earlier.network,
            {kind: n - earlier.operations.get(kind, 0) for kind, n in self.operations.items()},
            self.bus_bytes - earlier.bus_bytes,
            self.bus_time - earlier.bus_time,
            self.input_since,
        )


def read() -> Activity | None:
    """The counts so far; None if the native core does not run here, so that nothing is counted."""
    if not native.has_ops():
        return None
    counters = Counters()
    native.load().library.tfd_get_activity(ctypes.byref(counters))
    return Activity(
        counters.steps,
        _NANOSECONDS * counters.input_ns,
        _NANOSECONDS * counters.workers_ns,
        _NANOSECONDS * counters.network_ns,
        {kind: getattr(counters, kind) for kind in KINDS},
        counters.bus_bytes,
        _NANOSECONDS * counters.bus_ns,
        _NANOSECONDS * counters.input_since_ns or None,
    )


class GraphSpan:
    """A span between two places of the graph that is being traced; without effect elsewhere.

    Args:
        after: the tensors that exist where it begins.
    """

    def __init__(self, after: Sequence[Any]) -> None:
        self._begin = None
        if tf.executing_eagerly() or not native.has_ops():
            return
        self._graph = tf.compat.v1.get_default_graph()
        self._before = len(self._graph.get_operations())
        with tf.control_dependencies(self._of_this_graph(after)):
            self._begin = span_begins()

    def end(self, lane: str, name: str, after: Sequence[Any] | None = None) -> None:
        """Adds the end.

        Args:
            lane: the group of spans that it is shown in.
            name: what it is called.
            after: the tensors that exist where it ends; by default it ends when all operations
                that have been added since the beginning, and may write variables, have run.
        """
        # Inside another function, such as a branch of a conditional, there is no end.
        if self._begin is None or tf.compat.v1.get_default_graph() is not self._graph:
            return
        if after is None:
            ends = [op for op in self._graph.get_operations()[self._before :] if _acts(op)]
        else:
            ends = self._of_this_graph(after)
        with tf.control_dependencies(ends):
            span_ends(self._begin, lane, name)

    def _of_this_graph(self, tensors: Sequence[Any]) -> list[Any]:
        return [t for t in tensors if tf.is_tensor(t) and getattr(t, "graph", None) is self._graph]


def _acts(operation: Any) -> bool:
    """Whether an operation writes a variable, or may do so."""
    kind = operation.type
    return "Assign" in kind or kind.startswith("ResourceApply") or kind.endswith(("If", "While"))


_here = threading.local()
# The collection with a graph's marks of collectives that overlap.
_BESIDE = "tfdist_collectives_beside"


@contextlib.contextmanager
def overlapping() -> Iterator[None]:
    """Collectives added to a graph in this context run beside the step, which needs them later."""
    outer, _here.overlaps = overlaps(), True
    try:
        yield
    finally:
        _here.overlaps = outer


def overlaps() -> bool:
    """Whether this code runs inside `overlapping`."""
    return getattr(_here, "overlaps", False)


@dataclass(frozen=True)
class Bucket:
    """Tensors that are reduced in one collective.

    Attributes:
        key: the collective's key.
        members: the indices of the tensors.
        overlaps: whether the step goes on beside it.
        marks: what must run before the collective, or the recorder would hear of it too late.
    """

    key: str
    members: Sequence[int]
    overlaps: bool
    marks: Sequence[Any]


def marked_buckets(
    communicator: str,
    key: str,
    tensors: Sequence[tf.Tensor],
    plan: Sequence[Sequence[int]],
    *,
    notes: bool = True,
) -> Iterator[Bucket]:
    """The buckets of a reduction, marked, in a graph, for when their tensors exist.

    A collective starts only when those before it have ended, so its start does not tell. The step
    goes on beside all of them but the last: when all tensors exist, it waits. One collective alone
    tells by its start, unless it overlaps: a step may wait for it before it is even queued.

    Args:
        communicator: the communicator's name.
        key: the reduction's.
        tensors: what is reduced.
        plan: for each bucket the indices of its tensors.
        notes: whether this replica's marks count: one's among those of a process that share a
            communicator.
    """
    last = len(plan) - 1
    for number, members in enumerate(plan):
        part = f"{key}, part {number}" if key and number else key or f"{number}"
        beside = overlaps() or number < last
        made = []
        if notes and (beside or last > 0) and not tf.executing_eagerly():
            with _after(tensors if number == last else [tensors[i] for i in members]):
                made.append(ready(communicator, part, stalls=not beside))
            if beside:
                tf.compat.v1.get_default_graph().add_to_collection(_BESIDE, made[-1])
        yield Bucket(part, members, beside, made)


def mark_stall(communicator: str, values: Sequence[tf.Tensor]) -> None:
    """Records, in a graph, that a step which has these values waits for an overlapping collective.

    Args:
        communicator: the communicator's name.
        values: what the step computes before it needs the collective.
    """
    if not tf.executing_eagerly():
        # A short step may have the values before the collective's mark has been made.
        begun = tf.compat.v1.get_default_graph().get_collection(_BESIDE)
        if begun:
            with _after([*values, *begun]):
                ready(communicator)


def _after(elements: Sequence[Any]) -> Any:
    graph = tf.compat.v1.get_default_graph()
    return tf.control_dependencies([one for one in elements if one.graph is graph])
