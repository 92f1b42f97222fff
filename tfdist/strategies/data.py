"""Distributes datasets among workers.

If every worker can read the whole dataset, its global batches are kept: each replica takes its
rows of each batch, and the first replicas take one row more if the rows do not divide evenly. All
workers then see the same batches as a single process, in the same order. With a dataset of files,
an auto-shard policy of OFF or a dataset function, each worker reads separate batches, and the
workers agree before each step on whether any of them has rows left.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from tfdist.internals.tensorflow import (
    dataset_operations,
    distribute_lib,
    get_distributed_dataset,
    get_distributed_datasets_from_function,
)
from tfdist.strategies.first_batch import current_watcher
from tfdist.strategies.number_of_batches import agree_on_end
from tfdist.strategies.replay import current_replay
from tfdist.strategies.same_files import describe_files

_FILE_READERS = (
    "TFRecordDataset",
    "TextLineDataset",
    "FixedLengthRecordDataset",
    "CSVDataset",
    "SqlDataset",
)


def distribute_dataset(extended: tf.distribute.StrategyExtended, dataset: Any, options: Any) -> Any:
    """Distributes a dataset of global batches.

    Raises:
        ValueError: the elements are not batches.
    """
    options = options or _default_options(extended)
    if not extended.communicates:
        return get_distributed_dataset(
            dataset,
            extended.input_workers(options),
            extended.strategy,
            options=options,
        )
    _require_batches(dataset)
    if extended.spans_workers and not splits_batches(dataset):
        distributed = get_distributed_dataset(
            dataset,
            extended.input_workers(options),
            extended.strategy,
            num_replicas_in_sync=extended.replica_count,
            input_context=_input_context(extended),
            options=options,
        )
        shares = _policy(dataset) != tf.data.experimental.AutoShardPolicy.OFF
        files = describe_files(dataset) if shares else ""
        agree_on_end(extended, distributed, tf.data.UNKNOWN_CARDINALITY, files=files)
        return distributed
    watcher = current_watcher()
    per_worker_hint = not _in_order()
    watched = watcher.watch(dataset, per_worker_hint=per_worker_hint) if watcher else dataset
    shares = split_batches(
        watched,
        extended.place,
        len(extended.worker_devices),
        None if extended.group.elastic else extended.replica_count,
    )
    distributed = get_distributed_dataset(
        shares,
        extended.input_workers(options),
        extended.strategy,
        options=options,
    )
    agree_on_end(
        extended,
        distributed,
        int(dataset.cardinality()),
        same_data=True,
        per_worker_hint=per_worker_hint,
    )
    return distributed


def distribute_datasets_from_function(
    extended: tf.distribute.StrategyExtended, dataset_fn: Callable[[Any], Any], options: Any
) -> Any:
    """Distributes the per-worker datasets that the user's function returns."""
    options = options or _default_options(extended)
    distributed = get_distributed_datasets_from_function(
        dataset_fn,
        extended.input_workers(options),
        [_input_context(extended)],
        extended.strategy,
        options,
    )
    if extended.spans_workers:
        agree_on_end(extended, distributed, int(distributed.cardinality))
    return distributed


def _default_options(extended: tf.distribute.StrategyExtended) -> Any:
    if len(extended.worker_devices) > 1 or "CPU" not in extended.worker_devices[0]:
        return None
    # A plain iterator. The default one, made to feed several devices, also makes the process
    # return memory to the kernel after every step.
    return tf.distribute.InputOptions(
        experimental_fetch_to_device=False,
        experimental_replication_mode=tf.distribute.InputReplicationMode.PER_REPLICA,
    )


@contextlib.contextmanager
def in_order() -> Iterator[None]:
    """Makes distributed datasets split their batches, whatever their auto-shard policy.

    The concatenated rows of all workers are then in the dataset's order.
    """
    _local.in_order = True
    try:
        yield
    finally:
        _local.in_order = False


# Autograph takes longer to convert such functions than TensorFlow to trace them.
_as_written = tf.autograph.experimental.do_not_convert
_local = threading.local()


def _in_order() -> bool:
    return getattr(_local, "in_order", False)


def splits_batches(dataset: Any) -> bool:
    """Whether workers split each batch, rather than shard the files or nothing.

    As in TensorFlow, the policy AUTO shards files if the dataset reads any.
    """
    if _in_order():
        return True
    policy = _policy(dataset)
    shard = tf.data.experimental.AutoShardPolicy
    if policy in (shard.DATA, shard.HINT):
        return True
    if policy in (shard.OFF, shard.FILE):
        return False
    return not _reads_files(dataset)


def split_batches(
    dataset: Any, place: Callable[[Any], tuple[Any, Any]], count: int, fixed: int | None
) -> Any:
    """Splits every batch for this worker's replicas.

    Batches are prefetched before they are split, so that an iterator follows a change of the group:
    a share of rows is usually a reference to a part of the batch.

    Args:
        dataset: yields global batches; the first axis of every component is the rows.
        place: for one of this worker's replicas, its number among all, and their number.
        count: the number of this worker's replicas.
        fixed: the number of all replicas if it does not change.

    Returns:
        A dataset with `count` elements per batch: the rows of each replica, in order.
    """

    def cut(own: Any, *batch: Any) -> Any:
        element = batch if isinstance(dataset.element_spec, tuple) else batch[0]
        return take_share(element, *place(own), fixed)

    batches, replay = dataset.prefetch(1), current_replay()
    if replay is not None:
        batches = replay.of(batches)
    if count == 1:
        return _not_ahead(batches.map(_as_written(lambda *batch: cut(0, *batch))))

    def cut_all(*batch: Any) -> Any:
        local = tf.data.Dataset.range(count, output_type=tf.int32)
        return local.map(_as_written(lambda own: cut(own, *batch)))

    return _not_ahead(batches.flat_map(_as_written(cut_all)))


def _not_ahead(dataset: Any) -> Any:
    """The dataset without the prefetch that TensorFlow would put at its end."""
    options = tf.data.Options()
    options.experimental_optimization.inject_prefetch = False
    return dataset.with_options(options)


def take_share(batch: Any, replica: Any, replicas: Any, fixed: int | None) -> Any:
    """One replica's rows of every component of a batch.

    Args:
        batch: the batch.
        replica: the replica's number.
        replicas: the number of replicas.
        fixed: the same, if it does not change.
    """

    def take(component: Any) -> Any:
        if component is None or isinstance(component, tf.experimental.Optional):
            return component
        if isinstance(component, tf.SparseTensor):
            return _take_sparse(component, replica, replicas)
        rows = component.nrows() if isinstance(component, tf.RaggedTensor) else _rows(component)
        start, stop = share_of_rows(rows, replica, replicas)
        share = component[start:stop]
        if isinstance(component, tf.RaggedTensor):
            return share
        known = None if fixed is None else fixed_rows(component.shape[0], fixed)
        if known is None:
            return with_any_rows(share)
        share.set_shape([known, *component.shape[1:]])
        return share

    return tf.nest.map_structure(take, batch)


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
    """The static number of rows per replica; None if the model must not see it.

    A model sees only sizes that could also occur in one process, the same in all replicas. Much
    code treats None and one row as special cases.
    """
    if rows is None or rows % replicas or rows < 2 * replicas:
        return None
    return rows // replicas


def with_any_rows(tensor: tf.Tensor) -> tf.Tensor:
    """The tensor with an unknown number of rows while a function is traced."""
    if not tf.is_symbolic_tensor(tensor) or not tensor.shape.rank or tensor.shape[0] is None:
        return tensor
    shape = [None, *tensor.shape[1:]]
    return tf.raw_ops.PlaceholderWithDefault(input=tensor, shape=shape)


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


def _input_context(extended: tf.distribute.StrategyExtended) -> Any:
    return distribute_lib.InputContext(
        num_input_pipelines=extended.worker_count,
        input_pipeline_id=extended.worker_rank,
        num_replicas_in_sync=extended.replica_count,
    )


def _require_batches(dataset: Any) -> None:
    for spec in tf.nest.flatten(dataset.element_spec):
        shape = getattr(spec, "shape", None)
        if shape is not None and shape.rank == 0:
            raise ValueError(
                "A dataset must yield batches to be split among replicas: the first axis of every "
                f"component is the rows. Received: an element with a scalar, {spec}. "
                "Call `.batch(global_batch_size)` on the dataset."
            )


def _policy(dataset: Any) -> Any:
    return dataset.options().experimental_distribute.auto_shard_policy


def _reads_files(dataset: Any) -> bool:
    operations = dataset_operations(dataset)
    return any(reader in name for name in operations for reader in _FILE_READERS)
