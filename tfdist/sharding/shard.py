"""A part of a model's variable, which an optimizer updates in the variable's stead."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from tfdist.internals.tensorflow import ResourceVariable
from tfdist.sharding.layout import Piece


class Shard(keras.Variable):  # type: ignore[misc]
    """Some elements of a variable, flat, under the variable's name.

    Args:
        variable: the model's.
        piece: which elements.
        device: where they are.
    """

    def __init__(self, variable: Any, piece: Piece, device: str) -> None:
        self.variable, self.piece = variable, piece
        with local_variables(device):
            super().__init__(
                lambda shape, dtype: self.of(variable),
                (piece.size,),
                variable.dtype,
                name=variable.name.split("/")[-1].split(":")[0],
            )
        self._path = getattr(variable, "path", variable.name)

    def of(self, whole: Any) -> tf.Tensor:
        """The elements of a value of the whole variable's shape."""
        flat = tf.reshape(tf.convert_to_tensor(whole), [-1])
        return flat[self.piece.start : self.piece.stop]

    def of_slices(self, slices: tf.IndexedSlices) -> tf.IndexedSlices:
        """The elements of rows, of which one may come several times."""
        row = int(self.variable.shape[1:].num_elements())
        start, stop = self.piece.start, self.piece.stop
        rows = tf.logical_and(slices.indices >= start // row, slices.indices <= (stop - 1) // row)
        values = tf.reshape(tf.boolean_mask(slices.values, rows), [-1])
        first = tf.cast(tf.boolean_mask(slices.indices, rows), tf.int64) * row
        places = tf.reshape(first[:, tf.newaxis] + tf.range(row, dtype=tf.int64), [-1])
        if start % row or stop % row:
            mine = tf.logical_and(places >= start, places < stop)
            values, places = tf.boolean_mask(values, mine), tf.boolean_mask(places, mine)
        return tf.IndexedSlices(values, places - start, tf.constant([self.piece.size], tf.int64))


@contextlib.contextmanager
def local_variables(device: str) -> Iterator[None]:
    """Inside it variables are this process's own, whatever strategy is in scope."""

    def create(next_creator: Any, **kwargs: Any) -> Any:
        known = ("initial_value", "trainable", "name", "dtype", "shape")
        return ResourceVariable(**{name: kwargs[name] for name in known if name in kwargs})

    with tf.init_scope(), tf.device(device), tf.variable_creator_scope(create):
        yield
