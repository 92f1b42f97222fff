"""The rank and the size of a communicator as a graph reads them whenever it runs."""

from __future__ import annotations

import functools

import tensorflow as tf

from tfdist._src import native
from tfdist._src.comm import tokens
from tfdist._src.internals.tensorflow import only_reads_resources


def rank_and_size(communicator: str) -> tuple[tf.Tensor, tf.Tensor]:
    """This process's rank in a communicator, and the number of ranks, int32 scalars.

    Args:
        communicator: the communicator's name.
    """
    operations = native.load_ops()
    rank, size = operations.tfdist_group_shape(order=_order(), communicator=communicator)
    return rank, size


@functools.cache
def _order() -> tf.Tensor:
    """Keeps TensorFlow from running it in turn with operations that have no resource."""
    only_reads_resources("TfdistGroupShape")
    return tokens.make(str(tf.config.list_logical_devices("CPU")[0].name), tf.float32)
