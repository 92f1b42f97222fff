"""Marks, spans and counters of a step, for the flight recorder and timelines."""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from tfdist._src import native
from tfdist._src.comm import tokens
from tfdist._src.comm.registry import scope
from tfdist._src.internals.tensorflow import get_current_replica_id_as_int
from tfdist._src.native.api import Activity as Counters


def ready(communicator: str, key: str = "", *, stalls: bool = True) -> Any:
    """Adds a mark, an operation that reports that the inputs of a collective are available.

    Args:
        communicator: the communicator's name.
        key: the collective's key. With "", the mark reports instead that the step has no more work
            to do concurrently with the current collective.
        stalls: whether the step waits for the collective from now on.

    Returns:
        The operation, for control dependencies.
    """
    # Marks with the same resource run in order. A collective's inputs must be reported at once,
    # without waiting for a stall mark, which runs when everything is ready. So there are two
    # resources.
    order = _order("ready" if key else "stalls")
    return native.load_ops().tfdist_ready(
        order=order, communicator=communicator, key=key, stalls=stalls
    )


def input_begins() -> Any:
    """Adds a mark that reports that the step begins to wait for its input."""
    return native.load_ops().tfdist_input_begins(order=_order("input"))


def input_ends() -> None:
    """Adds a mark that reports that the step has received its input."""
    native.load_ops().tfdist_input_ends(order=_order("input"))


def span_begins() -> tf.Tensor:
    """Adds a mark that begins a span; returns the time for `span_ends`, 0 if none is recorded."""
    return native.load_ops().tfdist_span_begins(order=_order("spans"))


def span_ends(begin: tf.Tensor, lane: str, name: str) -> None:
    """Adds a mark that ends a span."""
    native.load_ops().tfdist_span_ends(order=_order("spans"), begin=begin, lane=lane, span=name)


def _order(kind: str) -> tf.Tensor:
    return _resource(kind, get_current_replica_id_as_int())


@functools.cache
def _resource(kind: str, replica: int | None) -> tf.Tensor:
    """The resource that orders marks of one kind without delaying marks of other kinds.

    Each replica has its own resource. A conditional that contains a mark holds the mark's resource.
    The conditionals of two replicas may contain parts of the same collective, so they must not wait
    for each other.
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
    """The activity of this process since it started, or between two moments.

    Times are in seconds, and exclude time during which the step ran concurrently with its
    collectives.

    Attributes:
        steps: steps of training, evaluation and prediction that have received their input.
        input: time spent waiting for batches that have since arrived.
        workers: time spent waiting for other workers to join a collective or to send a message.
        network: time spent waiting for the data of a collective or a message to move.
        operations: the collectives and messages that have succeeded, by kind.
        bus_bytes: the sum over these operations of the bytes of all values times the minimum share
            that each link must carry, from which nccl-tests computes the bus bandwidth.
        bus_time: the total duration of these operations; each counts from when all workers had
            joined it.
        input_since: the start of the current wait for a batch, by `time.monotonic()`; None if the
            step waits for no batch.
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
        """Returns the activity between an earlier moment and this one."""
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
    """Returns the activity so far; None if this process has not loaded the native core."""
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
    """A span between two points of the graph that is being traced; no effect in eager execution.

    Args:
        after: the span begins once these tensors are available.
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
        """Adds the end of the span.

        Args:
            lane: the lane of the timeline that shows the span.
            name: the span's name.
            after: the span ends once these tensors are available; by default, once all operations
                added since its beginning have run, except operations that cannot write variables.
        """
        # In the graph of another function, such as a branch of a conditional, no end can be added.
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


# The graph collection with the marks of the collectives that overlap with the step.
_BESIDE = "tfdist_collectives_beside"


@contextlib.contextmanager
def overlapping() -> Iterator[None]:
    """Records that collectives added to a graph in this context overlap with the step.

    The step needs their results only later.
    """
    outer, scope.overlaps = scope.overlaps, True
    try:
        yield
    finally:
        scope.overlaps = outer


@dataclass(frozen=True)
class Bucket:
    """Tensors that are reduced in one collective.

    Attributes:
        key: the collective's key.
        members: the indices of the tensors.
        overlaps: whether the step continues concurrently with the collective.
        marks: marks that must run before the collective, so that the recorder receives them in
            time.
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
    """Yields the buckets of a reduction; in a graph, with marks for when their tensors are ready.

    A collective starts only after the preceding collectives have ended, so its start does not show
    when its tensors were ready. The step runs concurrently with all collectives but the last one:
    once all tensors are ready, the step waits. A single collective needs a mark only if it
    overlaps with the step, because the step may then wait for a collective that is not queued yet.

    Args:
        communicator: the communicator's name.
        key: the reduction's key.
        tensors: the tensors to reduce.
        plan: for each bucket, the indices of its tensors.
        notes: whether this replica adds marks; only one of the replicas that share a communicator
            in a process does so.
    """
    last = len(plan) - 1
    for number, members in enumerate(plan):
        part = f"{key}, part {number}" if key and number else key or f"{number}"
        beside = scope.overlaps or number < last
        made = []
        if notes and (beside or last > 0) and not tf.executing_eagerly():
            with _after(tensors if number == last else [tensors[i] for i in members]):
                made.append(ready(communicator, part, stalls=not beside))
            if beside:
                tf.compat.v1.get_default_graph().add_to_collection(_BESIDE, made[-1])
        yield Bucket(part, members, beside, made)


def mark_stall(communicator: str, values: Sequence[tf.Tensor]) -> None:
    """Adds a mark to a graph: after these values, the step waits for an overlapping collective.

    Args:
        communicator: the communicator's name.
        values: the values that the step computes before it needs the collective.
    """
    if not tf.executing_eagerly():
        # In a short step, the values may be ready before the collective's own mark has run.
        begun = tf.compat.v1.get_default_graph().get_collection(_BESIDE)
        if begun:
            with _after([*values, *begun]):
                ready(communicator)


def _after(elements: Sequence[Any]) -> Any:
    graph = tf.compat.v1.get_default_graph()
    return tf.control_dependencies([one for one in elements if one.graph is graph])
