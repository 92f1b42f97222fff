"""Which tensors travel together."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from tfdist._src.comm.buckets import pack, plan, unpack


def floats(*counts):
    return [tf.zeros([count]) for count in counts]


def test_backward_order_and_size():
    assert plan(floats(10, 10, 10, 10), bucket_bytes=80) == [[3, 2], [1, 0]]


def test_first_bucket_leaves_early():
    assert plan(floats(10, 10, 10, 10), 80, first_bytes=40) == [[3], [2, 1], [0]]


def test_large_tensors_travel_alone():
    assert plan(floats(10, 30, 10), 80, alone_bytes=120) == [[2, 0], [1]]


def test_types_do_not_mix():
    tensors = [tf.zeros([10]), tf.zeros([10], tf.int32), tf.zeros([10])]
    assert plan(tensors, 80) == [[2, 0], [1]]


def test_unpack_takes_what_was_packed():
    tensors = [tf.reshape(tf.range(6.0), [2, 3]), tf.constant(7.0), tf.zeros([0, 2])]
    longer = tf.pad(pack(tensors), [[0, 3]])
    for value, tensor in zip(unpack(longer, tensors), tensors, strict=True):
        np.testing.assert_array_equal(value, tensor)
