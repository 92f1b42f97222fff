"""Exchanges requests and row counts among the workers in each step, in one collective.

All workers learn of a request in the same step. Without further communication, the exchange also
compares the row counts of a batch, the state assigned between the steps, and the step's program.
"""

import contextlib
import enum
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tfdist._src.comm import tokens
from tfdist._src.comm.tracing import overlapping
from tfdist._src.global_view.explain import StepFingerprints
from tfdist._src.strategy.extended import extended_of
from tfdist._src.strategy.step import RowCounts


class Request(enum.IntFlag):
    """Requests of one worker to all workers, granted at the end of a step."""

    SAVE_AND_EXIT = 1
    CHANGE_GROUP = 2


class GroupRequests(NamedTuple):
    """The workers' requests and differences in one execution of steps; equal on all workers.

    Attributes:
        asked: the requests that any worker has made.
        rows_differ: whether the workers' batches have different numbers of rows.
        state_differs: whether the workers' numbers for the state differ.
        program_differs: whether the workers have traced different programs for the same batches.
    """

    asked: Request
    rows_differ: bool = False
    state_differs: bool = False
    program_differs: bool = False


class StepExchange:
    """This process's part of the exchange: its requests and its state.

    A request is not an event: before each step, it is derived again from its cause on this worker.
    So no request is lost, and none has to be withdrawn.
    """

    def __init__(self) -> None:
        self._asks: dict[Request, Callable[[], bool]] = {}
        self._granted = Request(0)
        self._state = 0
        self._published: list[int] | None = None
        self._resource: tf.Tensor | None = None

    @contextlib.contextmanager
    def asking(self, request: Request, asks: Callable[[], bool]) -> Iterator[None]:
        """Within this context, each step carries a request if a function returns True.

        Args:
            request: the request.
            asks: called before each step; returns whether this worker makes the request.
        """
        before = dict(self._asks)
        self._asks[request] = asks
        try:
            yield
        finally:
            self._asks, self._granted = before, Request(0)

    def is_granted(self, request: Request) -> bool:
        """Whether any worker made the request before the last step; equal on all workers."""
        return request in self._granted

    def grant(self, asked: Request) -> None:
        """Records the requests that the workers made in a step."""
        self._granted = asked

    @property
    def wanted(self) -> Request:
        """This worker's requests."""
        wanted = Request(0)
        for request, asks in self._asks.items():
            wanted |= request if asks() else Request(0)
        return wanted

    def publish(self, state: int = 0) -> None:
        """Publishes the requests and the state to the next step.

        Args:
            state: a 30-bit number that must be equal on all workers.
        """
        self._state = state
        self._publish(0)

    def publish_rows(self, rows: int) -> None:
        """Publishes a batch's number of rows to the next step; it must be equal on all workers.

        Args:
            rows: the number, less than 2**30; 0 if it is unknown.
        """
        self._publish(rows)

    def _publish(self, rows: int) -> None:
        wanted = self.wanted
        numbers = [int(request in wanted) for request in Request]
        numbers += [*_compared(rows), *_compared(self._state)]
        if numbers != self._published:
            self._published = numbers
            tokens.assign(self._made(), tf.constant(numbers, tf.int32))

    def in_graph(self, told: tf.Tensor | None = None) -> tf.Tensor:
        """This worker's contribution, an int32 vector that a step sums over the replicas.

        Args:
            told: `told_rows` of the batch, or an empty vector on a worker without a batch; None
                for the published number.
        """
        numbers = tf.raw_ops.ReadVariableOp(resource=self._made(), dtype=tf.int32)
        if told is not None:
            told = tf.concat([told, tf.zeros([_NUMBERS], tf.int32)], axis=0)[:_NUMBERS]
            before, after = numbers[: len(Request)], numbers[len(Request) + _NUMBERS :]
            numbers = tf.concat([before, told, after], axis=0)
        return tf.ensure_shape(numbers, [_TOLD])

    def _made(self) -> tf.Tensor:
        if self._resource is None:
            self._resource = tokens.make(_host(), tf.int32, [_TOLD])
        return self._resource


class TracedProgram:
    """The number that a step contributes for its program, available once the step is traced."""

    def __init__(self) -> None:
        self._resource = tokens.make(_host(), tf.int32, [2 * _NUMBERS])

    def note(self, traced_for: str, program: StepFingerprints) -> None:
        """Sets the program that the step contributes each time it runs.

        Args:
            traced_for: the conditions of the trace, such as the batch's shapes.
            program: the program; must be equal on all workers with the same `traced_for`.
        """
        numbers = [zlib.crc32(repr(one).encode()) for one in (traced_for, program.values)]
        with tf.init_scope():
            both = [*_compared(numbers[0]), *_compared(numbers[1])]
            tokens.assign(self._resource, tf.constant(both, tf.int32))
        last_programs[traced_for] = program

    def in_graph(self) -> tf.Tensor:
        """This worker's contribution, an int32 vector that a step sums over the replicas."""
        numbers = tf.raw_ops.ReadVariableOp(resource=self._resource, dtype=tf.int32)
        return tf.ensure_shape(numbers, [2 * _NUMBERS])


def untraced() -> tf.Tensor:
    """The contribution of an untraced step, in the form of `TracedProgram.in_graph`."""
    return tf.zeros([2 * _NUMBERS], tf.int32)


def heard(sums: tf.Tensor, replicas: Any, unlike_rows: Any) -> tf.Tensor:
    """Evaluates the exchange of a step, as numbers that can be added over steps.

    Args:
        sums: the sums of `StepExchange.in_graph` and `TracedProgram.in_graph` over the replicas,
            an int32 vector.
        replicas: the number of replicas, int32.
        unlike_rows: the number of row counts that do not match shares of one batch, int32.

    Returns:
        An int32 vector for `as_heard`.
    """
    requests, numbers = sums[: len(Request)], tf.reshape(sums[len(Request) :], [-1, 2])
    differ = tf.cast(numbers[:, 0] * numbers[:, 0] != numbers[:, 1] * replicas, tf.int32)
    rows = unlike_rows + tf.reduce_sum(differ[:_HALVES])
    return tf.concat([requests, [rows], differ[_HALVES:]], axis=0)


def rows_of_heard(numbers: tf.Tensor) -> tf.Tensor:
    """The part of the result of `heard` that is 0 if all workers have shares of one batch."""
    return numbers[len(Request)]


def heard_nothing() -> tf.Tensor:
    """The result of `heard` for a single replica without requests."""
    return tf.zeros([len(Request) + 1 + 3 * _HALVES], tf.int32)


def as_heard(numbers: Sequence[int]) -> GroupRequests:
    """Decodes the sum of the results of `heard` over steps."""
    if not any(numbers):
        return _NOTHING
    asked = Request(0)
    for request, count in zip(Request, numbers, strict=False):
        asked |= request if count else Request(0)
    rows, *halves = numbers[len(Request) :]
    state, signature, program = (
        any(halves[i : i + _HALVES]) for i in range(0, 3 * _HALVES, _HALVES)
    )
    return GroupRequests(asked, bool(rows), state, program and not signature)


_NOTHING = GroupRequests(Request(0))

# Each number is sent as two halves and their squares. The numbers of all workers are equal if n
# times the sum of the squares equals the square of the sum, both modulo 2 ** 32.
_HALVES = 2
_NUMBERS = 2 * _HALVES
_TOLD = len(Request) + 2 * _NUMBERS


def _compared(number: int) -> list[int]:
    halves = number & 0x7FFF, number >> 15 & 0x7FFF
    return [value for half in halves for value in (half, half * half)]


def _host() -> str:
    return str(tf.config.list_logical_devices("CPU")[0].name)


step_exchange = StepExchange()
"""This process's part of the exchange."""

last_programs: dict[str, StepFingerprints] = {}
"""The programs traced since the last step, by their `traced_for`."""


def count_rows(batch: Any) -> tf.Tensor:
    """The number of rows of a batch: the first dimension of its first component."""
    for component in tf.nest.flatten(batch):
        if component is None or isinstance(component, tf.experimental.Optional):
            continue
        if isinstance(component, tf.RaggedTensor):
            return tf.cast(component.nrows(), tf.int32)
        if isinstance(component, tf.SparseTensor):
            return tf.cast(component.dense_shape[0], tf.int32)
        known = component.shape[0]
        return tf.shape(component)[0] if known is None else tf.constant(known, tf.int32)
    raise ValueError("A batch must contain at least one tensor. Received: an empty structure.")


def count_local_rows(strategy: tf.distribute.Strategy, batch: Any) -> tf.Tensor:
    """The rows of all local replicas, from the first component with rows; an int32 scalar.

    Args:
        strategy: the strategy that has distributed the batch.
        batch: a nest of tensors or of the local replicas' tensors; with a single replica, anything
            that a custom step accepts, possibly without rows.
    """
    for component in tf.nest.flatten(batch):
        parts = [v for v in strategy.experimental_local_results(component) if _has_rows(v)]
        if parts:
            return tf.add_n([count_rows(part) for part in parts])
    return tf.constant(0)


def exchange_rows(
    batch: Any,
    program: TracedProgram,
    *,
    shared: bool,
    awaited: bool = False,
    told: tf.Tensor | None = None,
) -> RowCounts:
    """Counts the rows of all replicas, which hold the batch in order; called by each replica.

    Args:
        batch: the replica's rows.
        program: the program of the step.
        shared: whether the replicas hold shares of one batch that every replica has in full.
        awaited: whether the forward pass waits for the result; see `once_compared`.
        told: as for `StepExchange.in_graph`.
    """
    rows = _same_rows(batch)
    extended = extended_of(tf.distribute.get_strategy())
    replica, replicas = extended.place_here()
    own = tf.one_hot(replica, replicas, on_value=rows, off_value=0, dtype=tf.int32)
    own = tf.concat([own, step_exchange.in_graph(told), program.in_graph()], axis=0)
    # Unless `awaited`, the forward pass does not need the number of rows.
    with contextlib.nullcontext() if awaited else overlapping():
        sums = extended.sum_over_replicas(own, "rows")
    counts, ends = sums[:replicas], tf.cumsum(sums[:replicas])
    return RowCounts(
        rows=rows,
        counts=counts,
        total=ends[-1],
        first_row=ends[replica] - rows,
        some_are_empty=tf.reduce_any(tf.equal(counts, 0)),
        heard=heard(sums[replicas:], replicas, unlike_shares(counts, ends[-1]) if shared else 0),
    )


def once_compared(batch: Any, counted: RowCounts) -> Any:
    """Returns a batch once all workers are known to have shares of one batch.

    Each worker traces the step for the number of rows of its own batch. If these numbers differed,
    the step could fail in many ways. If the assertion fails, it fails on all workers, before any
    other communication, and the group remains usable.

    Args:
        batch: the replica's rows.
        counted: the result of `exchange_rows`.
    """
    same = tf.debugging.Assert(tf.equal(rows_of_heard(counted.heard), 0), [_UNLIKE_SHARES])
    with tf.control_dependencies([same]):
        return tf.nest.map_structure(lambda v: v if v is None else tf.identity(v), batch)


def finds_unlike_shares(error: tf.errors.InvalidArgumentError) -> bool:
    """Whether an error was raised by `once_compared`."""
    return _UNLIKE_SHARES in str(error)


_UNLIKE_SHARES = "The workers have shares of batches with different numbers of rows."


def unlike_shares(counts: tf.Tensor, total: tf.Tensor, devices: int = 1) -> tf.Tensor:
    """The number of row counts that do not match the shares of one batch, an int32 scalar.

    Args:
        counts: the number of rows of each replica, or of each `devices` successive replicas
            together, an int32 vector.
        total: the sum of `counts`.
        devices: the number of replicas per count.
    """
    replicas = (counts.shape[0] or tf.size(counts)) * devices
    shares = total // replicas + tf.cast(tf.range(replicas) < total % replicas, tf.int32)
    if devices > 1:
        shares = tf.reduce_sum(tf.reshape(shares, [-1, devices]), axis=1)
    return tf.math.count_nonzero(counts - shares, dtype=tf.int32)


def _same_rows(batch: Any) -> tf.Tensor:
    """The number of rows of a batch, which all dense components must have."""
    rows = count_rows(batch)
    dense = [leaf for leaf in tf.nest.flatten(batch) if isinstance(leaf, tf.Tensor)]
    counts = [tf.shape(leaf)[0] for leaf in dense if leaf.shape.rank and leaf.shape[0] is None]
    if len(counts) < 2:
        return rows
    found = tf.stack(counts)
    same = tf.debugging.Assert(tf.reduce_all(tf.equal(found, rows)), [_UNLIKE_ROWS, found])
    with tf.control_dependencies([same]):
        return tf.identity(rows)


_UNLIKE_ROWS = (
    "The components of this batch have different numbers of rows, unlike those of the first one. "
    "Begin with a batch where they differ. A worker's rows of each:"
)


def gather_sparse(
    own: tf.SparseTensor, first_row: Any, total: Any, gather: Callable[[tf.Tensor], tf.Tensor]
) -> tf.SparseTensor:
    """The rows of all replicas, indexed as in the whole batch.

    Args:
        own: this replica's rows.
        first_row: the index of this replica's first row in the whole batch.
        total: the number of rows of the whole batch.
        gather: gathers the rows of a dense tensor.
    """
    others = own.dense_shape[1:]
    shift = tf.concat([[tf.cast(first_row, tf.int64)], tf.zeros_like(others)], axis=0)
    shape = tf.concat([[tf.cast(total, tf.int64)], others], axis=0)
    return tf.SparseTensor(gather(own.indices + shift), gather(own.values), shape)


def _has_rows(component: Any) -> bool:
    # False also for a tensor of unknown rank, which may be a scalar.
    return bool(tf.TensorShape(getattr(component, "shape", ())).rank)
