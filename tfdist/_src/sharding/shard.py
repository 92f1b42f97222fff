"""A shard of a model variable, which the optimizer updates in place of the variable."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from tfdist._src.internals.tensorflow import ResourceVariable
from tfdist._src.sharding.layout import Piece


class Shard(keras.Variable):  # type: ignore[misc]
    """Some elements of a model variable, flattened, under the variable's name.

    Args:
        variable: the model variable.
        piece: which of its elements.
        device: the device that holds them.
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
        """This shard's elements of a value of the full variable's shape."""
        flat = tf.reshape(tf.convert_to_tensor(whole), [-1])
        return flat[self.piece.start : self.piece.stop]

    def of_slices(self, slices: tf.IndexedSlices) -> tf.IndexedSlices:
        """This shard's elements of slices, whose indices may repeat."""
        row = int(self.variable.shape[1:].num_elements())
        start, stop = self.piece.start, self.piece.stop
        rows = tf.logical_and(slices.indices >= start // row, slices.indices <= (stop - 1) // row)
        values = tf.reshape(tf.boolean_mask(slices.values, rows), [-1])
        first = tf.cast(tf.boolean_mask(slices.indices, rows), tf.int64) * row
        places = tf.reshape(first[:, tf.newaxis] + tf.range(row, dtype=tf.int64), [-1])
        if start % row or stop % row:
            inside = tf.logical_and(places >= start, places < stop)
            values, places = tf.boolean_mask(values, inside), tf.boolean_mask(places, inside)
        return tf.IndexedSlices(values, places - start, tf.constant([self.piece.size], tf.int64))


@contextlib.contextmanager
def local_variables(device: str) -> Iterator[None]:
    """Creates variables local to this process, whatever strategy is in scope."""

    def create(next_creator: Any, **kwargs: Any) -> Any:
        known = ("initial_value", "trainable", "name", "dtype", "shape")
        return ResourceVariable(**{name: kwargs[name] for name in known if name in kwargs})

    with tf.init_scope(), tf.device(device), tf.variable_creator_scope(create):
        yield
