"""A row of zeros for a replica whose part of a batch is empty.

If a batch has fewer rows than there are replicas, some replicas have no rows but must still take
part. Many TensorFlow kernels do not support empty batches, and some layers treat them differently:
fused convolutions lose the shape, and Keras's `add` mistakes the batch for a bias. So such a
replica computes with a row of zeros, which is excluded from sums over the replicas, gradients,
metrics and moving statistics (`tfdist.strategies.step`); its predictions are dropped.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdist.jit import has_rows


def with_a_row(batch: Any, rows: tf.Tensor) -> Any:
    """Returns the batch, or one with a single row of zeros if it is empty.

    Args:
        batch: a nest of tensors with rows as the first dimension. A batch with ragged or sparse
            tensors is returned unchanged.
        rows: the number of rows, an int32 scalar.
    """
    flat = tf.nest.flatten(batch)
    present = [i for i, component in enumerate(flat) if component is not None]
    if tf.get_static_value(rows) or not all(isinstance(flat[i], tf.Tensor) for i in present):
        return batch
    chosen = tf.cond(
        has_rows(rows),
        lambda: [flat[i] for i in present],
        lambda: [_zeros(flat[i]) for i in present],
    )
    for i, component in zip(present, chosen, strict=True):
        flat[i] = component
    return tf.nest.pack_sequence_as(batch, flat)


def without_added_row(outputs: Any, rows: tf.Tensor) -> Any:
    """Drops the model's outputs for the row that `with_a_row` added.

    Args:
        outputs: a nest of dense or ragged tensors.
        rows: the number of rows without the added one.
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
