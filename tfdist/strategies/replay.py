"""A dataset that gives its last batch again if the step on it did not stand."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from tfdist.collective import tokens

_as_written = tf.autograph.experimental.do_not_convert


class Replay:
    """Whether the next batch of the datasets that pass through this is the last one once more.

    A batch is given again by its own dataset, inside its iterator, so that what reads the iterator
    need not know. What follows in the input pipeline must not read ahead.

    Example:
        >>> replay = Replay()
        >>> iterator = iter(replay.of(tf.data.Dataset.range(4).batch(2)))
        >>> first = next(iterator)
        >>> replay.request()
        >>> bool(tf.reduce_all(next(iterator) == first))
        True
    """

    def __init__(self) -> None:
        self._wanted = tokens.make(_host(), tf.int32)
        self._given = tokens.make(_host(), tf.int64)

    @property
    def given(self) -> int:
        """The number of batches so far, without repetitions."""
        return int(tf.raw_ops.ReadVariableOp(resource=self._given, dtype=tf.int64))

    def request(self) -> None:
        """Has the next batch be the last one again."""
        tf.raw_ops.AssignVariableOp(resource=self._wanted, value=1)

    def of(self, dataset: tf.data.Dataset) -> tf.data.Dataset:
        """The dataset, which can give its last element again."""

        def as_often_as_wanted(*element: Any) -> tf.data.Dataset:
            numbers = tf.data.Dataset.range(tf.int64.max).take_while(self._is_due)
            value = element if isinstance(dataset.element_spec, tuple) else element[0]
            return numbers.map(_as_written(lambda _: value))

        return dataset.flat_map(_as_written(as_often_as_wanted))

    @_as_written  # type: ignore[untyped-decorator]
    def _is_due(self, number: tf.Tensor) -> tf.Tensor:
        """Whether to give a batch for the first time, or again."""
        new = tf.equal(number, 0)
        wanted = tf.raw_ops.ReadVariableOp(resource=self._wanted, dtype=tf.int32)
        counted = tf.raw_ops.AssignAddVariableOp(resource=self._given, value=tf.cast(new, tf.int64))
        with tf.control_dependencies([wanted, counted]):
            granted = tf.raw_ops.AssignVariableOp(resource=self._wanted, value=0)
        with tf.control_dependencies([granted]):
            return tf.logical_or(new, wanted > 0)


_local = threading.local()


def _host() -> str:
    return str(tf.config.list_logical_devices("CPU")[0].name)


@contextlib.contextmanager
def replaying(replay: Replay | None) -> Iterator[None]:
    """Has the datasets that are distributed in this thread pass through `replay`."""
    _local.replay = replay
    try:
        yield
    finally:
        _local.replay = None


def current_replay() -> Replay | None:
    """What datasets that are distributed in this thread pass through, if anything."""
    return getattr(_local, "replay", None)
