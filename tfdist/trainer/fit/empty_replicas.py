"""A row to compute with for a replica that has none of a batch.

Where a batch has fewer rows than there are replicas, some have nothing to do, and take part all the
same. Many of TensorFlow's kernels take no batch of no rows, and layers tell it from others: its
fused convolutions lose its shape, Keras's `add` takes it for a bias. So such a replica computes
with a row of zeros, which counts for nothing: not in sums over the replicas, gradients, metrics and
moving statistics (`tfdist.strategies.step`), and what is predicted of it is dropped.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf


def with_a_row(batch: Any, rows: tf.Tensor) -> Any:
    """The batch; or one with a row of zeros, where it has none.

    Args:
        batch: a nest of tensors whose first dimension is the rows. One with ragged or sparse
            tensors stays as it is.
        rows: their number, an int32 scalar.
    """
    flat = tf.nest.flatten(batch)
    present = [i for i, component in enumerate(flat) if component is not None]
    if tf.get_static_value(rows) or not all(isinstance(flat[i], tf.Tensor) for i in present):
        return batch
    chosen = tf.cond(
        rows > 0, lambda: [flat[i] for i in present], lambda: [_zeros(flat[i]) for i in present]
    )
    for i, component in zip(present, chosen, strict=True):
        flat[i] = component
    return tf.nest.pack_sequence_as(batch, flat)


def without_it(outputs: Any, rows: tf.Tensor) -> Any:
    """What a model gives for such a batch; nothing, where there were no rows.

    Args:
        outputs: a nest of dense or ragged tensors.
        rows: how many the batch had without the row of zeros.
    """
    if tf.get_static_value(rows):
        return outputs

    def kept(output: Any) -> Any:
        ragged = isinstance(output, tf.RaggedTensor)
        count = output.nrows() if ragged else tf.shape(output, tf.int64)[0]
        return output[: tf.where(rows > 0, count, 0)]

    return tf.nest.map_structure(kept, outputs)


def _zeros(component: tf.Tensor) -> tf.Tensor:
    return tf.zeros(tf.concat([[1], tf.shape(component)[1:]], axis=0), component.dtype)
