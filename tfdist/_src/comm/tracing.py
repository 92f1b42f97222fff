"""Marks and spans in the graph of a step, and counters of this process's activity.

A mark is an operation that reports to the core that the step has reached a certain point. The
flight recorder and timelines use these reports. A span is a recorded interval of time in a
timeline.
"""

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
    """Adds a mark that reports that the inputs of a collective are available.

    Args:
        communicator: the communicator's name.
        key: the key of the collective. If the key is "", the mark instead reports that the step now
            waits for the current collective, because it has nothing else to run.
        stalls: whether the step waits for the collective from this point on.

    Returns:
        The operation, for use in control dependencies.
    """
    # Marks with the same resource run in program order. The mark for a collective's inputs must run
    # immediately, and must not wait for a mark with an empty key, which runs only when the step has
    # nothing else to run. Therefore the two kinds of marks have different resources.
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
    """Adds a mark that begins a span.

    Returns:
        The start time, to be passed to `span_ends`. It is 0 if no spans are being recorded when the
        mark runs.
    """
    return native.load_ops().tfdist_span_begins(order=_order("spans"))


def span_ends(begin: tf.Tensor, lane: str, name: str) -> None:
    """Adds a mark that ends a span.

    Args:
        begin: the result of `span_begins`.
        lane: the lane of the timeline that shows the span.
        name: the name of the span.
    """
    native.load_ops().tfdist_span_ends(order=_order("spans"), begin=begin, lane=lane, span=name)


def _order(kind: str) -> tf.Tensor:
    return _resource(kind, get_current_replica_id_as_int())


@functools.cache
def _resource(kind: str, replica: int | None) -> tf.Tensor:
    """Returns the resource that makes the marks of one kind run in program order.

    Marks of different kinds do not wait for each other, and neither do marks of different replicas.
    A conditional that contains a mark takes the mark's resource as an input. If two replicas shared
    a resource, their conditionals would run one after the other. This could cause a deadlock,
    because each conditional may contain the replica's part of the same collective.
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
    """Counters of this process's activity, either since its start or between two points in time.

    Times are in seconds. Time during which a step ran other operations at the same time as a
    collective does not count as waiting.

    Attributes:
        steps: the number of steps of training, evaluation and prediction that have received their
            input.
        input: the time that steps have waited for batches. A wait that has not ended yet does not
            count.
        workers: the time that steps have waited for other workers to join a collective or to send a
            message.
        network: the time that steps have waited while the data of a collective or message was
            transferred.
        operations: for each kind of collective and message, the number of calls that have
            succeeded.
        bus_bytes: the minimum number of bytes that each link had to transfer for these operations,
            as defined by the "bus bandwidth" of nccl-tests.
        bus_time: the total duration of these operations. The time before the last worker joined an
            operation does not count.
        input_since: the time when the current step began to wait for its batch, on the clock of
            `time.monotonic()`; None if it is not waiting for a batch.
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
        """Returns the activity since `earlier`, the result of an earlier call of `read`."""
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
    """Returns the activity so far; None if this process has not loaded the native operations."""
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
    """Records the time between two points of a graph in the timeline.

    Has no effect in eager execution.

    Args:
        after: the tensors that must be available before the span begins.
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
        """Adds the mark that ends the span.

        Args:
            lane: the lane of the timeline that shows the span.
            name: the name of the span.
            after: the tensors that must be available before the span ends. By default, the span
                ends when all operations have run that were added to the graph since the span's
                beginning and may write a variable.
        """
        # The end must be in the same graph as the beginning, and not, for example, in a branch of a
        # conditional.
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
    """Whether an operation may write a variable."""
    kind = operation.type
    return "Assign" in kind or kind.startswith("ResourceApply") or kind.endswith(("If", "While"))


# The name of the graph collection that contains the marks of collectives that overlap with the
# step.
_BESIDE = "tfdist_collectives_beside"


@contextlib.contextmanager
def overlapping() -> Iterator[None]:
    """Declares that collectives added to a graph within this context overlap with the step.

    The step needs the results of these collectives only later, and runs other operations meanwhile.
    """
    outer, scope.overlaps = scope.overlaps, True
    try:
        yield
    finally:
        scope.overlaps = outer


@dataclass(frozen=True)
class Bucket:
    """A group of tensors that one collective reduces.

    Attributes:
        key: the key of the collective.
        members: the indices of the bucket's tensors among all tensors to reduce.
        overlaps: whether the step runs other operations at the same time as the collective.
        marks: the marks that must run before the collective, so that the flight recorder receives
            them before the collective begins.
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
    """Yields the buckets of a reduction. In a graph, adds marks that report when tensors are ready.

    The marks are needed because a collective begins only after the collectives before it have
    ended. Its start time therefore does not show when its tensors were ready. While tensors are
    still being computed, the step runs at the same time as the collectives of the first buckets.
    When the tensors of all buckets are ready, the step waits. If there is only one bucket, a mark
    is added only if its collective overlaps with the step.

    Args:
        communicator: the communicator's name.
        key: the key of the reduction.
        tensors: the tensors to reduce.
        plan: for each bucket, the indices of its tensors.
        notes: whether to add marks. Of the replicas that share a communicator in a process, only
            one must add marks.
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
    """Adds a mark that reports that the step now waits for an overlapping collective.

    Args:
        communicator: the communicator's name.
        values: the tensors that the step computes before it needs the result of the collective.
    """
    if not tf.executing_eagerly():
        # In a short step, `values` may be ready before the marks of the collectives have run. This
        # mark must run after those.
        begun = tf.compat.v1.get_default_graph().get_collection(_BESIDE)
        if begun:
            with _after([*values, *begun]):
                ready(communicator)


def _after(elements: Sequence[Any]) -> Any:
    graph = tf.compat.v1.get_default_graph()
    return tf.control_dependencies([one for one in elements if one.graph is graph])
