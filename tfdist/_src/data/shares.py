"""Divides batches among the replicas, and repeats batches or forms new ones after group changes."""

import ctypes
import functools
import weakref
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

import tensorflow as tf

from tfdist._src import native
from tfdist._src.comm.communicator_interface import Communicator
from tfdist._src.internals.datasets import derived_dataset
from tfdist.errors import UnsupportedError

T = TypeVar("T")


class RowsRead(NamedTuple):
    """How much of a dataset an iterator has read.

    Attributes:
        batches: the number of batches of the dataset itself that have been read.
        rows: the number of rows in these batches.
        pending: the number of rows that have been read, but not yet returned by the iterator.
        pending_batches: the number of batches of the dataset that contain the pending rows.
    """

    batches: int = 0
    rows: int = 0
    pending: int = 0
    pending_batches: int = 0

    @property
    def given(self) -> int:
        """The number of rows that the iterator has returned."""
        return self.rows - self.pending


class Replay:
    """Controls which batches a dataset returns next.

    If the step that used the last batch was not committed, the dataset returns this batch again. If
    the number of rows per worker must stay the same when the group changes, the dataset forms new
    batches from its rows, in order. Both happen inside the iterator, so that the code that reads
    from the iterator need not be changed. Later stages of the input pipeline must not read ahead.
    Datasets refer to this object by its number; see `split_batches`.

    Args:
        keeps_rows: whether the number of rows per worker stays the same when the group changes.

    Attributes:
        number: the number by which the native core identifies this object.
        keeps_rows: whether the number of rows per worker stays the same when the group changes.
        is_used: whether this object controls a dataset. False if each worker reads separate
            batches.
        has_whole: whether `show_next` can return whole batches.
    """

    def __init__(self, *, keeps_rows: bool = False) -> None:
        self._core = native.load().library
        number = ctypes.c_int64()
        self._core.tfd_replay_create(ctypes.byref(number))
        self.number, self.keeps_rows = number.value, keeps_rows
        self._workers = 0
        self.is_used = self.has_whole = False
        weakref.finalize(self, self._core.tfd_replay_close, self.number)

    @property
    def given(self) -> int:
        """The number of batches returned so far, not counting repetitions."""
        given = ctypes.c_int64()
        self._core.tfd_replay_given(self.number, ctypes.byref(given))
        return given.value

    def request(self) -> None:
        """Makes the iterator return the previous batch once more."""
        self._core.tfd_replay_request(self.number)

    def show_next(self, take_next: Callable[[], T]) -> T:
        """Returns the next batch with the rows of all workers.

        Afterwards, the iterator returns this worker's part of the same batch as usual.

        Args:
            take_next: takes a batch from the iterator. Returns a false value at the end of the
                data.

        Returns:
            The result of `take_next`.
        """
        self._core.tfd_replay_give_whole(self.number, True)
        try:
            batch = take_next()
        finally:
            self._core.tfd_replay_give_whole(self.number, False)
        if batch:
            self.request()
        return batch

    def keep_rows(self, workers: int, batch: int = 0) -> None:
        """Fixes the number of rows per worker at its share of a batch of the dataset.

        Args:
            workers: the number of workers among which such a batch would be divided.
            batch: the number of rows of such a batch. If 0, the number of rows of the first batch
                that is read is used.
        """
        self._workers = workers
        self._core.tfd_replay_keep_rows(self.number, workers, batch)

    @property
    def workers(self) -> int:
        """The `workers` that were passed to `keep_rows`; 0 if the rows per worker are not fixed."""
        return self._workers

    @property
    def dataset_batch(self) -> int:
        """The number of rows of a batch of the dataset; 0 if unknown."""
        return self._batch(1)[0]

    def batch_for(self, workers: int) -> int:
        """Returns the number of rows of a batch with a given number of workers; 0 if unknown."""
        return self._batch(workers)[1]

    def _batch(self, workers: int) -> tuple[int, int]:
        own, rows = ctypes.c_int64(), ctypes.c_int64()
        self._core.tfd_replay_batch(self.number, workers, ctypes.byref(own), ctypes.byref(rows))
        return own.value, rows.value

    def skip(self, rows: int, discard_next: Callable[[], object]) -> None:
        """Skips the next rows.

        Args:
            rows: the number of rows.
            discard_next: takes the next batch from the iterator and discards it.
        """
        while rows:
            some = min(rows, max(1, self.dataset_batch))
            self._core.tfd_replay_want(self.number, some)
            discard_next()
            rows -= some

    def read(self, *, before_last: bool = False) -> RowsRead:
        """Returns how much of the data the most recently used iterator has read.

        Args:
            before_last: whether to count the last batch of the iterator as not yet returned.
        """
        counts = [ctypes.c_int64() for _ in range(4)]
        self._core.tfd_replay_rows(self.number, before_last, *map(ctypes.byref, counts))
        return RowsRead(*(count.value for count in counts))


# AutoGraph does not convert the functions below, because this would take more time than to trace
# them.
_as_written = tf.autograph.experimental.do_not_convert


def split_batches(
    dataset: Any,
    workers: Communicator,
    count: int,
    fixed: int | None,
    replay: Replay | None = None,
) -> Any:
    """Splits every batch of a dataset for this worker's replicas.

    Batches are prefetched before they are split. So if the group changes, the prefetched batches
    can still be split for the new group. Usually, a share of the rows refers to the memory of the
    batch instead of copying the rows.

    Args:
        dataset: a dataset of global batches. The first axis of every component is the rows.
        workers: the communicator with one participant per worker.
        count: the number of this worker's replicas.
        fixed: the number of all replicas; None if it may change.
        replay: controls the batches that the dataset returns; None to leave them unchanged.

    Returns:
        A dataset with `count` elements per batch: the rows of each replica, in order.

    Raises:
        UnsupportedError: `replay` forms new batches, but the dataset has sparse or ragged tensors.
    """
    batches = dataset.prefetch(1)
    specs = tf.nest.flatten(dataset.element_spec)
    tensors = all(isinstance(spec, tf.TensorSpec) for spec in specs)
    if replay is not None and replay.keeps_rows and not tensors:
        raise UnsupportedError(
            'Elastic(batch="per_worker") needs batches of dense tensors, because it recombines '
            f"their rows. Received: {dataset.element_spec}. Pass dense tensors, or "
            'Elastic(batch="global").'
        )
    if not native.has_ops():
        return not_ahead(_in_functions(_for_each_replica(batches, count), workers, count, fixed))
    split = functools.partial(_natively, batches, workers, count, replay)
    if tensors:
        spec = tf.nest.map_structure(lambda one: of_share(one, fixed), dataset.element_spec)
        return not_ahead(split(spec, splits=True))
    whole = split((dataset.element_spec, tf.TensorSpec([], tf.int64)), splits=False)
    return not_ahead(_in_functions(whole, workers, count, fixed))


def of_share(spec: Any, fixed: int | None) -> Any:
    """Returns the spec of one replica's share of a component."""
    if not isinstance(spec, tf.TensorSpec) or not spec.shape.rank:
        return spec
    return tf.TensorSpec([_static_rows(spec, fixed), *spec.shape[1:]], spec.dtype)


def _natively(
    batches: Any,
    workers: Communicator,
    count: int,
    replay: Replay | None,
    spec: Any,
    *,
    splits: bool,
) -> Any:
    """Returns a native dataset of the replicas' rows, or of whole batches with replica indices."""
    name = workers.lasting_name
    if replay is not None:
        replay.is_used, replay.has_whole = True, splits
    return derived_dataset(
        batches,
        native.load_ops().tfdist_shares_dataset,
        spec,
        communicator=name,
        worker=0 if name else workers.rank,
        workers=1 if name else workers.size,
        replicas=count,
        splits=splits,
        replay=0 if replay is None else replay.number,
    )


def _for_each_replica(batches: Any, count: int) -> Any:
    """Repeats each batch for each of this worker's replicas, with the index of the replica."""

    def repeat(*batch: Any) -> Any:
        element = as_element(batches.element_spec, batch)
        return tf.data.Dataset.range(count).map(_as_written(lambda own: (element, own)))

    return batches.flat_map(_as_written(repeat))


def _in_functions(batches: Any, workers: Communicator, count: int, fixed: int | None) -> Any:
    """Splits batches that are paired with a replica's index, in a function of the dataset.

    Unlike in the native dataset, components may have any type. TensorFlow may run the function
    before its result is needed. It does not if the function reads a rank that may change.
    """

    def cut(batch: Any, own: tf.Tensor) -> Any:
        worker, size = workers.place()
        replica = tf.cast(worker, own.dtype) * count + own
        return take_share(batch, replica, size * count, fixed, own_memory=True)

    return batches.map(_as_written(cut))


def not_ahead(dataset: Any) -> Any:
    """Returns the dataset without the prefetch that TensorFlow would append."""
    options = tf.data.Options()
    options.experimental_optimization.inject_prefetch = False
    return dataset.with_options(options)


def take_share(
    batch: Any, replica: Any, replicas: Any, fixed: int | None, *, own_memory: bool = False
) -> Any:
    """Returns one replica's rows of every component of a batch.

    Args:
        batch: the batch.
        replica: the index of the replica.
        replicas: the number of replicas.
        fixed: the number of replicas; None if it may change.
        own_memory: whether to copy the rows. The memory of a dataset's batch may belong to an array
            from a Python generator. TensorFlow knows this for the batch, but not for a slice of the
            batch. Without a copy, the next operation could therefore overwrite the array with its
            result.
    """

    def take(component: Any) -> Any:
        if component is None or isinstance(component, tf.experimental.Optional):
            return component
        if isinstance(component, tf.SparseTensor):
            return _take_sparse(component, replica, replicas)
        rows = component.nrows() if isinstance(component, tf.RaggedTensor) else _rows(component)
        start, stop = share_of_rows(rows, replica, replicas)
        if own_memory:
            share = tf.gather(component, tf.range(start, stop))
        else:
            share = component[start:stop]
        if isinstance(component, tf.RaggedTensor):
            return share
        known = _static_rows(component, fixed)
        if known is None:
            return with_any_rows(share)
        share.set_shape([known, *component.shape[1:]])
        return share

    return tf.nest.map_structure(take, batch)


class WithRows(NamedTuple):
    """A global batch, or a replica's share of it, together with the global batch's number of rows.

    Attributes:
        batch: the batch, or a replica's share of it.
        told: the number of rows, encoded by `told_rows`. A global batch contains one copy for each
            replica, so that each share contains one.
    """

    batch: Any
    told: Any


def with_rows(batch: Any, replicas: int) -> WithRows:
    """Combines a batch with its number of rows, before it is split among `replicas` replicas."""
    return WithRows(batch, tf.tile(told_rows(_rows_of(batch)), [replicas]))


def without_rows(batch: Any) -> tuple[Any, Any]:
    """Separates a batch, or its spec, from the encoded number of rows, which is None by default."""
    return batch if isinstance(batch, WithRows) else (batch, None)


def told_rows(rows: Any) -> tf.Tensor:
    """Encodes a number below 2**30 as two halves, each followed by its square; int32.

    The numbers of n workers are equal only if n times the sum of their squares is the square of
    their sum. So sums over the workers show whether the numbers are equal.
    """
    halves = tf.stack([rows % 2**15, rows // 2**15])
    return tf.reshape(tf.stack([halves, halves * halves], axis=1), [-1])


def _rows_of(batch: Any) -> Any:
    """Returns the number of rows of the first component that has rows; 0 if there is none."""
    for component in tf.nest.flatten(batch):
        if isinstance(component, tf.RaggedTensor):
            return tf.cast(component.nrows(), tf.int32)
        if isinstance(component, tf.SparseTensor):
            return tf.cast(component.dense_shape[0], tf.int32)
        if isinstance(component, tf.Tensor) and component.dtype != tf.variant:
            return _rows(component)
    return tf.constant(0)


def as_element(spec: Any, parts: tuple[Any, ...]) -> Any:
    """Returns an element of a dataset, given the arguments that a function in `map` receives.

    Args:
        spec: the spec of an element. A dataset passes the parts of a plain tuple as separate
            arguments, but it passes a named tuple as one argument.
        parts: the arguments of the function.
    """
    return parts if type(spec) is tuple else parts[0]


class BatchForm(NamedTuple):
    """The known properties of a global batch while its step is traced.

    Attributes:
        rows: the number of rows of the batch; None if unknown.
        whole: the indices of the flat components that have another row count than the batch, such
            as the edges of a graph in a batch of nodes. Each replica uses all rows of these
            components.
        shared: whether all workers have read the whole batch, so that each replica takes its share
            of it.
        given: whether the batch was passed to a call such as `train_on_batch`. The workers compare
            such a batch only in the step that uses it.
    """

    rows: int | None = None
    whole: tuple[int, ...] = ()
    shared: bool = False
    given: bool = False


def components_apart(sizes: Mapping[int, tuple[int, int]]) -> tuple[int, ...]:
    """Returns the indices of the components with another row count than the main row count.

    The main row count of a batch covers the most bytes of the batch.

    Args:
        sizes: the numbers of rows and bytes of the dense components, keyed by component indices.

    Example:
        >>> components_apart({0: (10, 160), 1: (26, 208), 2: (10, 40)})
        (0, 2)
    """
    totals: dict[int, int] = {}
    for rows, size in sizes.values():
        totals[rows] = totals.get(rows, 0) + size
    main = max(totals, key=lambda rows: totals[rows], default=0)
    return tuple(number for number, (rows, _) in sizes.items() if rows != main)


def share_of_rows(rows: Any, replica: Any, replicas: Any) -> tuple[Any, Any]:
    """Returns a replica's first row, and the row after its last row.

    If the rows do not divide evenly, the first replicas have one row more.

    Example:
        >>> [share_of_rows(5, r, 3) for r in range(3)]
        [(0, 2), (2, 4), (4, 5)]
    """
    if isinstance(rows, int) and isinstance(replica, int):
        least, excess = rows // replicas, rows % replicas
        start = replica * least + min(replica, excess)
        return start, start + least + (replica < excess)
    replica, replicas = tf.cast(replica, rows.dtype), tf.cast(replicas, rows.dtype)
    least, excess = rows // replicas, rows % replicas
    start = replica * least + tf.minimum(replica, excess)
    return start, start + least + tf.cast(replica < excess, rows.dtype)


def fixed_rows(rows: int | None, replicas: int) -> int | None:
    """Returns the static number of rows per replica; None if it must not be static in a trace.

    In a trace, a model can see static sizes. So they must be sizes that could also occur in a
    single process, and they must be the same on all replicas. One row per replica is never static,
    because much code treats a single row as a special case.
    """
    if rows is None or rows % replicas or rows < 2 * replicas:
        return None
    return rows // replicas


def with_any_rows(tensor: tf.Tensor) -> tf.Tensor:
    """Hides the static number of rows of a tensor while a function is traced."""
    if not tf.is_symbolic_tensor(tensor) or not tensor.shape.rank or tensor.shape[0] is None:
        return tensor
    shape = [None, *tensor.shape[1:]]
    return tf.raw_ops.PlaceholderWithDefault(input=tensor, shape=shape)


def _static_rows(component: Any, fixed: int | None) -> int | None:
    """Returns the static number of rows of a share; None if it must not be static."""
    return None if fixed is None else fixed_rows(component.shape[0], fixed)


def _rows(component: Any) -> Any:
    return tf.shape(component)[0]


def _take_sparse(component: tf.SparseTensor, replica: Any, replicas: Any) -> tf.SparseTensor:
    shape = component.dense_shape
    start, stop = share_of_rows(shape[0], replica, replicas)
    zeros = tf.zeros_like(shape[1:])
    return tf.sparse.slice(
        component,
        start=tf.concat([[start], zeros], axis=0),
        size=tf.concat([[stop - start], shape[1:]], axis=0),
    )
