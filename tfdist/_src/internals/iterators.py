"""The position of iterators over datasets, and of Keras's iterators over epochs."""

import contextlib
import re
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf
from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter
from keras.src.trainers.data_adapters.py_dataset_adapter import PyDatasetAdapter
from keras.src.trainers.data_adapters.tf_dataset_adapter import TFDatasetAdapter
from tensorflow.python.data.ops.iterator_ops import OwnedIterator

from tfdist._src.internals.datasets import caches, common_shuffles, shuffle_passes, shuffles

# Errors of iterators that cannot be serialized, such as iterators of Python generators.
_NOT_SERIALIZABLE = (tf.errors.UnimplementedError, tf.errors.FailedPreconditionError)
_IGNORE_EXTERNAL_STATE = 1
# The name under which an iterator saves the count of numbers drawn by a shuffle.
_DRAWN = b"num_random_samples"


def position_of(iterator: Any) -> bytes | None:
    """The position of an iterator, including the contents of its buffers and its shuffles' seeds.

    Args:
        iterator: an iterator over a dataset, distributed or not.

    Returns:
        Bytes for `set_position`; None if the iterator cannot be serialized.
    """
    plain = _plain(iterator)
    if plain is None:
        return None
    try:
        state = tf.raw_ops.SerializeIterator(
            resource_handle=plain._iterator_resource, external_state_policy=_IGNORE_EXTERNAL_STATE
        )
        return bytes(tf.io.serialize_tensor(state).numpy())
    except _NOT_SERIALIZABLE:
        return None


def set_position(iterator: Any, position: bytes) -> None:
    """Moves an iterator over a dataset to the position of another iterator over the same dataset.

    In iterators that are created later over this dataset, shuffles also continue with the seeds of
    that other iterator.

    Raises:
        ValueError: the position belongs to another dataset.
    """
    plain = _plain(iterator)
    if plain is None:
        raise ValueError("Only the iterator of a single device has a position.")
    try:
        state = tf.io.parse_tensor(position, tf.variant)
        tf.raw_ops.DeserializeIterator(resource_handle=plain._iterator_resource, serialized=state)
    except tf.errors.OpError as error:
        raise ValueError(
            f"The position belongs to another dataset: {_plain_text(error)}"
        ) from error


def _plain_text(error: tf.errors.OpError) -> str:
    """The first line of a message, without TensorFlow's names of functions."""
    return re.sub(r"\{\{.*?\}\} ?", "", str(error)).splitlines()[0]


def has_seeds(position: bytes) -> bool:
    """Whether a position includes the seeds of shuffles, as it does until all data is read."""
    return _DRAWN in position


def _plain(iterator: Any) -> OwnedIterator | None:
    """The plain iterator of a distributed iterator; None if it has several devices."""
    parts = getattr(iterator, "_iterators", None)
    if parts is not None:
        iterator = parts[0]._iterator if len(parts) == 1 else None
    return iterator if isinstance(iterator, OwnedIterator) else None


def take_over(epochs: Any, earlier: Any) -> None:
    """Makes Keras's new epoch iterator continue in place of an earlier one over the same data."""
    vars(epochs).update(vars(earlier))


@contextlib.contextmanager
def within_epoch(epochs: Any) -> Iterator[None]:
    """Within this context, Keras's epoch iterator begins an epoch without `on_epoch_begin`.

    This is for an epoch that the data has already begun.
    """
    adapter = epochs.data_adapter
    adapter.on_epoch_begin = lambda: None
    try:
        yield
    finally:
        del adapter.on_epoch_begin


def new_iterator(epochs: Any) -> Any:
    """A new iterator over the dataset of Keras's epoch iterator."""
    return iter(epochs._get_iterator())


def lasting_iterator(epochs: Any) -> Any:
    """The iterator that the next epoch continues; None unless `steps_per_epoch` is set."""
    return epochs._current_iterator if epochs.steps_per_epoch else None


def unread_iterator(epochs: Any, read: Any) -> Any:
    """The iterator that Keras created at the end of an epoch; None if it created none.

    Keras creates one if it knew the length of the epoch.

    Args:
        epochs: Keras's epoch iterator.
        read: the iterator that has been read.
    """
    return None if epochs._current_iterator is read else epochs._current_iterator


def batches_seen(epochs: Any) -> int:
    """Keras's count of the batches taken from its iterator."""
    return int(epochs._steps_seen)


def set_batches_seen(epochs: Any, batches: int) -> None:
    """Sets Keras's count of the batches taken from its iterator."""
    epochs._steps_seen = batches


def last_of(epochs: Any, step: Any) -> int:
    """The number of the last batch that Keras's epoch iterator has yielded for a step."""
    # Keras 3.8 yields only the number of the first batch.
    return int(step[-2]) if len(step) > 2 else int(step[0]) + int(epochs.steps_per_execution) - 1


def rows_of_batches(epochs: Any, last: int) -> int | None:
    """The number of rows of each batch that Keras's epoch iterator yields next, if known.

    Args:
        epochs: Keras's epoch iterator.
        last: the number of the last of these batches.
    """
    adapter = epochs.data_adapter
    known: int | None = getattr(epochs._distributed_dataset, "batch_rows", None)
    if known is not None or not isinstance(adapter, ArrayDataAdapter):
        return known
    is_whole = not adapter.has_partial_batch or last < adapter.num_batches - 1
    return int(adapter.batch_size) if is_whole else None


def replace_dataset(epochs: Any, distributed: Any) -> None:
    """Makes the next epoch of Keras's epoch iterator read another distributed dataset."""
    epochs._distributed_dataset = distributed
    epochs._current_iterator = None


def set_number_of_batches(epochs: Any, batches: int | None) -> None:
    """Sets the number of batches that Keras takes from its iterator; None if unknown."""
    epochs._num_batches = batches


def initial_epoch(model: Any) -> int:
    """The first epoch of the running call of `fit`, as set by a callback; 0 if none has set it."""
    return int(model._initial_epoch or 0)


def set_initial_epoch(model: Any, epoch: int | None) -> None:
    """Sets the first epoch of the running call of `fit`; None selects `fit`'s own argument."""
    model._initial_epoch = epoch


def validation_epochs(model: Any) -> Any:
    """Keras's epoch iterator over the validation data of the running call of `fit`, if any."""
    return getattr(model, "_eval_epoch_iterator", None)


def forget_validation_data(model: Any) -> None:
    """Makes the running call of `fit` distribute its validation data again."""
    model._eval_epoch_iterator = None


def replay_epochs(adapter: Any, count: int) -> None:
    """Calls the epoch methods of an adapter's data for past epochs, without reading any data."""
    if not isinstance(adapter, PyDatasetAdapter):
        return
    for _ in range(count):
        adapter.py_dataset.on_epoch_begin()
        adapter.py_dataset.on_epoch_end()


def changes_between_epochs(adapter: Any) -> bool:
    """Whether an adapter's data overrides the methods called when epochs begin or end."""
    if not isinstance(adapter, PyDatasetAdapter):
        return False
    mine, base = type(adapter.py_dataset), keras.utils.PyDataset
    names = ("on_epoch_begin", "on_epoch_end")
    return any(getattr(mine, name, None) is not getattr(base, name, None) for name in names)


def remembers_epochs(adapter: Any) -> bool:
    """Whether one of Keras's adapters has data that is cached in the first epoch."""
    dataset = _dataset_of(adapter)
    if not isinstance(dataset, tf.data.Dataset):
        return False
    return caches(dataset) and int(dataset.cardinality()) != tf.data.INFINITE_CARDINALITY


def draws_anew(adapter: Any) -> bool:
    """Whether iterators over an adapter's data may differ in order, and have positions to save."""
    dataset = _dataset_of(adapter)
    return dataset is not None and shuffles(dataset) and not caches(dataset)


def draw_together(one: Any, other: Any) -> bool:
    """Whether the data of two of Keras's adapters share a shuffle."""
    first, second = _dataset_of(one), _dataset_of(other)
    return first is not None and second is not None and common_shuffles(first, second)


def shuffles_per_epoch(adapter: Any) -> int:
    """The number of orders that a shuffle in the data of a Keras adapter draws per epoch."""
    dataset = _dataset_of(adapter)
    return 1 if dataset is None else shuffle_passes(dataset)


def _dataset_of(adapter: Any) -> Any:
    """The dataset passed to `fit`; None for other kinds of data."""
    return adapter.get_tf_dataset() if isinstance(adapter, TFDatasetAdapter) else None


def stop_reading(adapter: Any) -> None:
    """Ends the threads and processes that read data for one of Keras's adapters."""
    enqueuer = getattr(adapter, "enqueuer", None)
    if enqueuer is not None:
        enqueuer.stop()
