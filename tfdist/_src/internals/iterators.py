"""Reads and sets the positions of dataset iterators and of Keras's epoch iterators.

In this module, `epochs` is Keras's epoch iterator (`TFEpochIterator`), which yields the batches of
all epochs in a call of `fit`. An adapter is Keras's wrapper for the data that is passed to `fit`.
"""

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

# TensorFlow raises one of these errors if an iterator cannot be serialized. An example is the
# iterator of a Python generator.
_NOT_SERIALIZABLE = (tf.errors.UnimplementedError, tf.errors.FailedPreconditionError)
_IGNORE_EXTERNAL_STATE = 1
# The name under which a serialized iterator contains the count of random numbers that a shuffle has
# drawn.
_DRAWN = b"num_random_samples"


def position_of(iterator: Any) -> bytes | None:
    """Returns the position of an iterator.

    The position includes the contents of the iterator's buffers and the seeds of its shuffles.

    Args:
        iterator: an iterator over a dataset, or over a distributed dataset.

    Returns:
        The position, as bytes that can be passed to `set_position`. None if the iterator cannot be
        serialized.
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
    """Sets the position of an iterator to that of another iterator over an equal dataset.

    The seeds of the dataset's shuffles are also set. Iterators that are created later over this
    dataset therefore continue the random order of the other iterator.

    Args:
        iterator: the iterator to change.
        position: the result of `position_of` for the other iterator.

    Raises:
        ValueError: the position belongs to a different dataset.
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
    """Returns the first line of an error's message, without TensorFlow's names of nodes."""
    return re.sub(r"\{\{.*?\}\} ?", "", str(error)).splitlines()[0]


def has_seeds(position: bytes) -> bool:
    """Whether a position includes the seeds of shuffles.

    The position of an iterator does not include them after the iterator has read all data.
    """
    return _DRAWN in position


def _plain(iterator: Any) -> OwnedIterator | None:
    """Returns the plain iterator inside a distributed iterator; None if there is none."""
    parts = getattr(iterator, "_iterators", None)
    if parts is not None:
        iterator = parts[0]._iterator if len(parts) == 1 else None
    return iterator if isinstance(iterator, OwnedIterator) else None


def take_over(epochs: Any, earlier: Any) -> None:
    """Copies the state of an earlier epoch iterator over the same data to a new one."""
    vars(epochs).update(vars(earlier))


@contextlib.contextmanager
def within_epoch(epochs: Any) -> Iterator[None]:
    """Makes an epoch iterator begin an epoch without a call of the adapter's `on_epoch_begin`.

    Use this context to continue an epoch for which `on_epoch_begin` has already been called.
    """
    adapter = epochs.data_adapter
    adapter.on_epoch_begin = lambda: None
    try:
        yield
    finally:
        del adapter.on_epoch_begin


def new_iterator(epochs: Any) -> Any:
    """Creates a new iterator over the dataset of an epoch iterator."""
    return iter(epochs._get_iterator())


def lasting_iterator(epochs: Any) -> Any:
    """Returns the iterator that the next epoch will continue to read.

    Returns None if `steps_per_epoch` is not set, because each epoch then has a new iterator.
    """
    return epochs._current_iterator if epochs.steps_per_epoch else None


def unread_iterator(epochs: Any, read: Any) -> Any:
    """Returns the iterator that Keras created at the end of an epoch.

    Keras creates this iterator only if it knew the number of batches before the epoch. Returns None
    otherwise.

    Args:
        epochs: Keras's epoch iterator.
        read: the iterator that was read in the epoch.
    """
    return None if epochs._current_iterator is read else epochs._current_iterator


def batches_seen(epochs: Any) -> int:
    """Returns the number of batches that an epoch iterator has taken so far."""
    return int(epochs._steps_seen)


def set_batches_seen(epochs: Any, batches: int) -> None:
    """Sets the number of batches that an epoch iterator has taken so far."""
    epochs._steps_seen = batches


def last_of(epochs: Any, step: Any) -> int:
    """Returns the index of the last batch of a step.

    Args:
        epochs: Keras's epoch iterator.
        step: the tuple that the epoch iterator has yielded for the step.
    """
    # In Keras 3.8, the tuple contains only the index of the first batch.
    return int(step[-2]) if len(step) > 2 else int(step[0]) + int(epochs.steps_per_execution) - 1


def rows_of_batches(epochs: Any, last: int) -> int | None:
    """Returns the number of rows in each of the next batches of an epoch iterator, if known.

    Args:
        epochs: Keras's epoch iterator.
        last: the index of the last of these batches.
    """
    adapter = epochs.data_adapter
    known: int | None = getattr(epochs._distributed_dataset, "batch_rows", None)
    if known is not None or not isinstance(adapter, ArrayDataAdapter):
        return known
    is_whole = not adapter.has_partial_batch or last < adapter.num_batches - 1
    return int(adapter.batch_size) if is_whole else None


def replace_dataset(epochs: Any, distributed: Any) -> None:
    """Makes an epoch iterator read another distributed dataset from the next epoch on."""
    epochs._distributed_dataset = distributed
    epochs._current_iterator = None


def set_number_of_batches(epochs: Any, batches: int | None) -> None:
    """Sets the number of batches in an epoch; None if the number is unknown."""
    epochs._num_batches = batches


def initial_epoch(model: Any) -> int:
    """Returns the index of the first epoch, as set by a callback in `fit`; 0 if it is not set."""
    return int(model._initial_epoch or 0)


def set_initial_epoch(model: Any, epoch: int | None) -> None:
    """Sets the index of the first epoch of the running call of `fit`.

    None selects the argument `initial_epoch` that was passed to `fit`.
    """
    model._initial_epoch = epoch


def validation_epochs(model: Any) -> Any:
    """Returns the epoch iterator over the validation data of the running call of `fit`, if any."""
    return getattr(model, "_eval_epoch_iterator", None)


def forget_validation_data(model: Any) -> None:
    """Makes the running call of `fit` create a new iterator over its validation data."""
    model._eval_epoch_iterator = None


def replay_epochs(adapter: Any, count: int) -> None:
    """Calls `on_epoch_begin` and `on_epoch_end` of an adapter's data as in earlier epochs.

    This brings a `keras.utils.PyDataset` into its state after these epochs, without reading any
    data.

    Args:
        adapter: the adapter of the data.
        count: the number of epochs.
    """
    if not isinstance(adapter, PyDatasetAdapter):
        return
    for _ in range(count):
        adapter.py_dataset.on_epoch_begin()
        adapter.py_dataset.on_epoch_end()


def changes_between_epochs(adapter: Any) -> bool:
    """Whether an adapter's data has its own method `on_epoch_begin` or `on_epoch_end`."""
    if not isinstance(adapter, PyDatasetAdapter):
        return False
    mine, base = type(adapter.py_dataset), keras.utils.PyDataset
    names = ("on_epoch_begin", "on_epoch_end")
    return any(getattr(mine, name, None) is not getattr(base, name, None) for name in names)


def remembers_epochs(adapter: Any) -> bool:
    """Whether an adapter's data is a finite dataset that caches elements in the first epoch."""
    dataset = _dataset_of(adapter)
    if not isinstance(dataset, tf.data.Dataset):
        return False
    return caches(dataset) and int(dataset.cardinality()) != tf.data.INFINITE_CARDINALITY


def draws_anew(adapter: Any) -> bool:
    """Whether an adapter's data is a dataset with a different random order in each iterator.

    Returns False for a dataset with a cache.
    """
    dataset = _dataset_of(adapter)
    return dataset is not None and shuffles(dataset) and not caches(dataset)


def draw_together(one: Any, other: Any) -> bool:
    """Whether the datasets of two adapters have a shuffle in common."""
    first, second = _dataset_of(one), _dataset_of(other)
    return first is not None and second is not None and common_shuffles(first, second)


def shuffles_per_epoch(adapter: Any) -> int:
    """Returns how often a shuffle in an adapter's dataset draws a new order in each epoch."""
    dataset = _dataset_of(adapter)
    return 1 if dataset is None else shuffle_passes(dataset)


def _dataset_of(adapter: Any) -> Any:
    """Returns the dataset that was passed to `fit`; None if the data is not a dataset."""
    return adapter.get_tf_dataset() if isinstance(adapter, TFDatasetAdapter) else None


def stop_reading(adapter: Any) -> None:
    """Ends the threads and processes that read data for an adapter."""
    enqueuer = getattr(adapter, "enqueuer", None)
    if enqueuer is not None:
        enqueuer.stop()
