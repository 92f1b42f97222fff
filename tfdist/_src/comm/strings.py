"""Gathers strings through collectives that support only numbers."""

from __future__ import annotations

from collections.abc import Callable

import tensorflow as tf


def gather_strings(tensor: tf.Tensor, all_gather: Callable[[tf.Tensor], tf.Tensor]) -> tf.Tensor:
    """Gathers a string tensor as its bytes and their lengths.

    Args:
        tensor: strings of any shape with rank >= 1.
        all_gather: concatenates the group's numeric tensors along axis 0.
    """
    flat = tf.reshape(tensor, [-1])
    codes = tf.io.decode_raw(tf.strings.reduce_join(flat), tf.uint8)
    lengths = all_gather(tf.strings.length(flat))
    rows = tf.reduce_sum(all_gather(tf.shape(tensor)[:1]))
    codes = all_gather(tf.cast(codes, tf.int32))
    letters = tf.gather(tf.constant([bytes([code]) for code in range(256)]), codes)
    words = tf.strings.reduce_join(tf.RaggedTensor.from_row_lengths(letters, lengths), axis=1)
    row = tf.shape(tensor)[1:]
    return tf.ensure_shape(
        tf.reshape(words, tf.concat([[rows], row], axis=0)), [None, *tensor.shape[1:]]
    )
