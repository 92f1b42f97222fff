"""Exchanges requests and row counts among the workers in each step, in one collective.

All workers learn of a request in the same step. The same collective also shows whether the workers
differ in the row counts of a batch, in the state that code has assigned between the steps, or in
the program of the step. This needs no further communication.
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
    """Requests that a worker can make to all workers. They take effect at the end of a step."""

    SAVE_AND_EXIT = 1
    CHANGE_GROUP = 2


class GroupRequests(NamedTuple):
    """The workers' requests and differences, as found in one call of the step function.

    The values are equal on all workers.

    Attributes:
        asked: the requests that any worker has made.
        rows_differ: whether the workers' batches have different numbers of rows.
        state_differs: whether the workers' checksums of the state differ.
        program_differs: whether the workers have traced different programs for the same batches.
    """

    asked: Request
    rows_differ: bool = False
    state_differs: bool = False
    program_differs: bool = False


class StepExchange:
    """The requests and the checksum of the state that this process contributes to the exchange.

    A request is not a message that is sent once. Before each step, a function decides whether this
    worker makes the request in this step. So no request can be lost, and no request has to be
    withdrawn.
    """

    def __init__(self) -> None:
        self._asks: dict[Request, Callable[[], bool]] = {}
        self._granted = Request(0)
        self._state = 0
        self._published: list[int] | None = None
        self._resource: tf.Tensor | None = None

    @contextlib.contextmanager
    def asking(self, request: Request, asks: Callable[[], bool]) -> Iterator[None]:
        """Makes each step in this context carry a request if `asks` returns True.

        Args:
            request: the request.
            asks: called before each step. Returns whether this worker makes the request in this
                step.
        """
        before = dict(self._asks)
        self._asks[request] = asks
        try:
            yield
        finally:
            self._asks, self._granted = before, Request(0)

    def is_granted(self, request: Request) -> bool:
        """Whether any worker made the request in the last step; the same on all workers."""
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
        """Sets the requests and the checksum of the state that the next step sends.

        Args:
            state: a 30-bit checksum that must be equal on all workers.
        """
        self._state = state
        self._publish(0)

    def publish_rows(self, rows: int) -> None:
        """Sets the number of rows that the next step sends. It must be equal on all workers.

        Args:
            rows: the number of rows of the whole batch, less than 2**30; 0 if it is unknown.
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
        """Returns this worker's int32 vector for the exchange. The step sums it over all replicas.

        Args:
            told: the encoded number of rows that the batch contains (see `told_rows`), or an empty
                vector on a worker without a batch. None to send the number that was passed to
                `publish_rows`.
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
    """The checksum that a step sends for its program. It is set once the step is traced."""

    def __init__(self) -> None:
        self._resource = tokens.make(_host(), tf.int32, [2 * _NUMBERS])

    def note(self, traced_for: str, program: StepFingerprints) -> None:
        """Sets the checksum that the step sends each time it runs.

        Args:
            traced_for: the conditions under which the step was traced, such as the shapes of the
                batch.
            program: the fingerprint of the program. It must be equal on all workers that have the
                same `traced_for`.
        """
        numbers = [zlib.crc32(repr(one).encode()) for one in (traced_for, program.values)]
        with tf.init_scope():
            both = [*_compared(numbers[0]), *_compared(numbers[1])]
            tokens.assign(self._resource, tf.constant(both, tf.int32))
        last_programs[traced_for] = program

    def in_graph(self) -> tf.Tensor:
        """Returns the program's int32 vector for the exchange. The step sums it over replicas."""
        numbers = tf.raw_ops.ReadVariableOp(resource=self._resource, dtype=tf.int32)
        return tf.ensure_shape(numbers, [2 * _NUMBERS])


def untraced() -> tf.Tensor:
    """Returns zeros in place of `TracedProgram.in_graph`, for a step without a traced program."""
    return tf.zeros([2 * _NUMBERS], tf.int32)


def heard(sums: tf.Tensor, replicas: Any, unlike_rows: Any) -> tf.Tensor:
    """Evaluates the sums of an exchange. The results of several steps can be added up.

    Args:
        sums: the sums of `StepExchange.in_graph` and `TracedProgram.in_graph` over the replicas,
            an int32 vector.
        replicas: the number of replicas, int32.
        unlike_rows: the number of row counts that differ from the shares of one batch, int32; see
            `unlike_shares`.

    Returns:
        An int32 vector that `as_heard` decodes.
    """
    requests, numbers = sums[: len(Request)], tf.reshape(sums[len(Request) :], [-1, 2])
    differ = tf.cast(numbers[:, 0] * numbers[:, 0] != numbers[:, 1] * replicas, tf.int32)
    rows = unlike_rows + tf.reduce_sum(differ[:_HALVES])
    return tf.concat([requests, [rows], differ[_HALVES:]], axis=0)


def rows_of_heard(numbers: tf.Tensor) -> tf.Tensor:
    """Returns the element of `heard`'s result that is 0 if all workers have shares of one batch."""
    return numbers[len(Request)]


def heard_nothing() -> tf.Tensor:
    """Returns the result of `heard` for a single replica that makes no requests."""
    return tf.zeros([len(Request) + 1 + 3 * _HALVES], tf.int32)


def as_heard(numbers: Sequence[int]) -> GroupRequests:
    """Decodes the result of `heard`, or the sum of its results over several steps."""
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

# Each number is sent as two halves and the squares of the halves. The halves of all n workers count
# as equal if n times the sum of the squares equals the square of the sum. Both are computed modulo
# 2 ** 32.
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
    """Returns the number of rows of a batch, the first dimension of its first component."""
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
    """Counts the rows of all local replicas in the first component that has rows; an int32 scalar.

    Args:
        strategy: the strategy that has distributed the batch.
        batch: a nest of tensors or of per-replica values. With a single replica, it may be anything
            that a custom step accepts, even without rows.
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
    """Exchanges the row counts of all replicas. Every replica must call this function.

    The rows of a replica follow the rows of the previous replica in the whole batch.

    Args:
        batch: the replica's rows.
        program: the checksum of the step's program, which is exchanged as well.
        shared: whether every worker has the whole batch, so that each replica takes a share of it.
            If so, the row counts must match these shares.
        awaited: whether the forward pass must wait for the result, as with `once_compared`.
        told: as for `StepExchange.in_graph`.
    """
    rows = _same_rows(batch)
    extended = extended_of(tf.distribute.get_strategy())
    replica, replicas = extended.place_here()
    own = tf.one_hot(replica, replicas, on_value=rows, off_value=0, dtype=tf.int32)
    own = tf.concat([own, step_exchange.in_graph(told), program.in_graph()], axis=0)
    # Unless `awaited` is set, the forward pass does not need the row counts, so the exchange may
    # overlap with it.
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
    """Returns a batch that waits for a check that all workers have shares of the same batch.

    Each worker traces the step for the number of rows of its own batch. If these numbers differed,
    the step could fail in many ways. The check fails on all workers, before any other
    communication, so that the group remains usable.

    Args:
        batch: the replica's rows.
        counted: the result of `exchange_rows`.
    """
    same = tf.debugging.Assert(tf.equal(rows_of_heard(counted.heard), 0), [_UNLIKE_SHARES])
    with tf.control_dependencies([same]):
        return tf.nest.map_structure(lambda v: v if v is None else tf.identity(v), batch)


def finds_unlike_shares(error: tf.errors.InvalidArgumentError) -> bool:
    """Whether an error is the failure of the check in `once_compared`."""
    return _UNLIKE_SHARES in str(error)


_UNLIKE_SHARES = "The workers have shares of batches with different numbers of rows."


def unlike_shares(counts: tf.Tensor, total: tf.Tensor, devices: int = 1) -> tf.Tensor:
    """Returns how many row counts differ from the shares of one batch, as an int32 scalar.

    A share is the number of rows that `shares.take_share` would take for a replica.

    Args:
        counts: an int32 vector of the number of rows of each replica, or of each group of `devices`
            successive replicas.
        total: the sum of `counts`.
        devices: the number of replicas per element of `counts`.
    """
    replicas = (counts.shape[0] or tf.size(counts)) * devices
    shares = total // replicas + tf.cast(tf.range(replicas) < total % replicas, tf.int32)
    if devices > 1:
        shares = tf.reduce_sum(tf.reshape(shares, [-1, devices]), axis=1)
    return tf.math.count_nonzero(counts - shares, dtype=tf.int32)


def _same_rows(batch: Any) -> tf.Tensor:
    """Returns the number of rows of a batch. Its dense components must all have this number."""
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
    """Gathers a sparse tensor from all replicas, with row indices in the whole batch.

    Args:
        own: this replica's rows of the sparse tensor.
        first_row: the index of this replica's first row in the whole batch.
        total: the number of rows of the whole batch.
        gather: gathers the rows of a dense tensor from all replicas.
    """
    others = own.dense_shape[1:]
    shift = tf.concat([[tf.cast(first_row, tf.int64)], tf.zeros_like(others)], axis=0)
    shape = tf.concat([[tf.cast(total, tf.int64)], others], axis=0)
    return tf.SparseTensor(gather(own.indices + shift), gather(own.values), shape)


def _has_rows(component: Any) -> bool:
    # The result is False also for a tensor of unknown rank, because it may be a scalar.
    return bool(tf.TensorShape(getattr(component, "shape", ())).rank)
