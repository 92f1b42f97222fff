"""The rows that each replica reads of a batch, and the repetition of batches."""

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
    """The amount of a dataset that an iterator has read.

    Attributes:
        batches: the number of the dataset's own batches that were read.
        rows: the number of rows in these batches.
        pending: the number of these rows that are still to be returned.
        pending_batches: the number of the dataset's own batches that contain the pending rows.
    """

    batches: int = 0
    rows: int = 0
    pending: int = 0
    pending_batches: int = 0

    @property
    def given(self) -> int:
        """The number of rows that have been returned."""
        return self.rows - self.pending


class Replay:
    """Controls the next output of the datasets that pass through it.

    Repeats the last batch if no committed step used it. If a worker's part of a batch must keep its
    number of rows in another group, forms new batches from the dataset's rows, in order. Both
    happen inside the iterator, so that its consumer need not be changed. Later stages of the input
    pipeline must not read ahead. Datasets refer to this object by its number; see `split_batches`.

    Args:
        keeps_rows: whether a worker's part of a batch keeps its number of rows.

    Attributes:
        number: the number of this object in the core.
        keeps_rows: whether a worker's part of a batch keeps its number of rows.
        is_used: whether a dataset passes through this object; False if each worker reads separate
            batches.
        has_whole: whether this object can return whole batches to a worker.
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
        """Takes the whole next batch on this worker; the iterator then returns it again as usual.

        Args:
            take_next: takes a batch; returns a false value at the end of the data.

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
        """Fixes a worker's rows per batch at its share of one of the dataset's own batches.

        Args:
            workers: the number of workers that share such a batch.
            batch: the number of rows of such a batch; if 0, the number of rows of the first batch
                that is read.
        """
        self._workers = workers
        self._core.tfd_replay_keep_rows(self.number, workers, batch)

    @property
    def workers(self) -> int:
        """The number of workers that share one of the dataset's own batches; 0 for any number."""
        return self._workers

    @property
    def dataset_batch(self) -> int:
        """The number of rows of the dataset's own batches; 0 if unknown."""
        return self._batch(1)[0]

    def batch_for(self, workers: int) -> int:
        """The number of rows of a batch for a number of workers; 0 if unknown."""
        return self._batch(workers)[1]

    def _batch(self, workers: int) -> tuple[int, int]:
        own, rows = ctypes.c_int64(), ctypes.c_int64()
        self._core.tfd_replay_batch(self.number, workers, ctypes.byref(own), ctypes.byref(rows))
        return own.value, rows.value

    def skip(self, rows: int, discard_next: Callable[[], object]) -> None:
        """Skips the next rows.

        Args:
            rows: the number of rows.
            discard_next: takes the next batch.
        """
        while rows:
            some = min(rows, max(1, self.dataset_batch))
            self._core.tfd_replay_want(self.number, some)
            discard_next()
            rows -= some

    def read(self, *, before_last: bool = False) -> RowsRead:
        """Returns how much of the data the most recently used iterator has read.

        Args:
            before_last: whether to count the iterator's last batch as not yet returned.
        """
        counts = [ctypes.c_int64() for _ in range(4)]
        self._core.tfd_replay_rows(self.number, before_last, *map(ctypes.byref, counts))
        return RowsRead(*(count.value for count in counts))


# Autograph would need more time to convert the functions below than TensorFlow needs to trace them.
_as_written = tf.autograph.experimental.do_not_convert


def split_batches(
    dataset: Any,
    workers: Communicator,
    count: int,
    fixed: int | None,
    replay: Replay | None = None,
) -> Any:
    """Splits every batch for this worker's replicas.

    Batches are prefetched before they are split, so that an iterator can follow a change of the
    group. Usually, a share of the rows refers to the batch's memory instead of copying it.

    Args:
        dataset: yields global batches; the first axis of every component is the rows.
        workers: the communicator with one participant per worker.
        count: the number of this worker's replicas.
        fixed: the number of all replicas; None if it may change.
        replay: controls the batches that the dataset returns; None if they are the dataset's own.

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
        return _not_ahead(_in_functions(_for_each_replica(batches, count), workers, count, fixed))
    split = functools.partial(_natively, batches, workers, count, replay)
    if tensors:
        spec = tf.nest.map_structure(lambda one: _of_share(one, fixed), dataset.element_spec)
        return _not_ahead(split(spec, splits=True))
    whole = split((dataset.element_spec, tf.TensorSpec([], tf.int64)), splits=False)
    return _not_ahead(_in_functions(whole, workers, count, fixed))


def _of_share(spec: Any, fixed: int | None) -> Any:
    """The spec of a share of a component."""
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
    """Returns a dataset of replicas' rows, or of whole batches with the replicas' numbers."""
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
    """Repeats each batch for each of this worker's replicas, with the replica's number."""

    def repeat(*batch: Any) -> Any:
        element = as_element(batches.element_spec, batch)
        return tf.data.Dataset.range(count).map(_as_written(lambda own: (element, own)))

    return batches.flat_map(_as_written(repeat))


def _in_functions(batches: Any, workers: Communicator, count: int, fixed: int | None) -> Any:
    """Splits batches that are paired with a replica's number; components may have any type.

    TensorFlow may run the function before its result is needed, unless it reads a place that may
    change.
    """

    def cut(batch: Any, own: tf.Tensor) -> Any:
        worker, size = workers.place()
        replica = tf.cast(worker, own.dtype) * count + own
        return take_share(batch, replica, size * count, fixed, own_memory=True)

    return batches.map(_as_written(cut))


def _not_ahead(dataset: Any) -> Any:
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
        replica: the replica's number.
        replicas: the number of replicas.
        fixed: the number of replicas; None if it may change.
        own_memory: whether to copy the rows. The memory of a dataset's batch may belong to an array
            from a Python generator. TensorFlow knows this for the batch, but not for a slice of the
            batch, so the next operation would overwrite the array with its result.
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
    """A batch with its number of rows, which each replica keeps with its share.

    Attributes:
        batch: the batch, or a replica's share of it.
        told: the number of rows as encoded by `told_rows`, once for each replica that has a share.
    """

    batch: Any
    told: Any


def with_rows(batch: Any, replicas: int) -> WithRows:
    """Returns a batch with its number of rows, for the shares of `replicas` replicas."""
    return WithRows(batch, tf.tile(told_rows(_rows_of(batch)), [replicas]))


def without_rows(batch: Any) -> tuple[Any, Any]:
    """Returns a batch, or its spec, and the encoding of its number of rows, if it has one."""
    return batch if isinstance(batch, WithRows) else (batch, None)


def told_rows(rows: Any) -> tf.Tensor:
    """Encodes a number below 2**30 as two halves, each followed by its square; int32.

    Only if the numbers of n workers are equal, n times the sum of their squares is the square of
    their sum.
    """
    halves = tf.stack([rows % 2**15, rows // 2**15])
    return tf.reshape(tf.stack([halves, halves * halves], axis=1), [-1])


def _rows_of(batch: Any) -> Any:
    """The number of rows of the first component with rows; 0 if there is none."""
    for component in tf.nest.flatten(batch):
        if isinstance(component, tf.RaggedTensor):
            return tf.cast(component.nrows(), tf.int32)
        if isinstance(component, tf.SparseTensor):
            return tf.cast(component.dense_shape[0], tf.int32)
        if isinstance(component, tf.Tensor) and component.dtype != tf.variant:
            return _rows(component)
    return tf.constant(0)


def as_element(spec: Any, parts: tuple[Any, ...]) -> Any:
    """Returns an element of a dataset, given the arguments of a function called by the dataset.

    Args:
        spec: the spec of an element. A dataset unpacks a plain tuple, but not a named one.
        parts: the arguments.
    """
    return parts if type(spec) is tuple else parts[0]


class BatchForm(NamedTuple):
    """The known properties of a global batch while its step is traced.

    Attributes:
        rows: its number of rows; None if unknown.
        whole: the numbers of the flat components with a different row count than the batch, such as
            the edges of a graph with a batch of nodes. Each replica uses all of their rows.
        shared: whether all workers have read the batch, and each replica takes its share of it.
        given: whether the batch was passed to a call such as `train_on_batch`. If so, the workers
            compare it only in its step.
    """

    rows: int | None = None
    whole: tuple[int, ...] = ()
    shared: bool = False
    given: bool = False


def components_apart(sizes: Mapping[int, tuple[int, int]]) -> tuple[int, ...]:
    """Returns the components with a row count other than the one that covers the most bytes.

    Args:
        sizes: the numbers of rows and bytes of dense components, by component number.

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
    """The half-open range of rows of a replica; the first replicas take the excess.

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
    """The static number of rows per replica; None if the number must not be static in a trace.

    A model may see only sizes that could also occur in a single process and that are the same on
    all replicas. One row per replica is not static, because much code treats it as a special case.
    """
    if rows is None or rows % replicas or rows < 2 * replicas:
        return None
    return rows // replicas


def with_any_rows(tensor: tf.Tensor) -> tf.Tensor:
    """Returns the tensor with an unknown number of rows while a function is traced."""
    if not tf.is_symbolic_tensor(tensor) or not tensor.shape.rank or tensor.shape[0] is None:
        return tensor
    shape = [None, *tensor.shape[1:]]
    return tf.raw_ops.PlaceholderWithDefault(input=tensor, shape=shape)


def _static_rows(component: Any, fixed: int | None) -> int | None:
    """The number of rows of a share, if the model may know it."""
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
