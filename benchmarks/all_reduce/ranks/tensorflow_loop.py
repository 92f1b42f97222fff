"""Repeats a reduction in a loop in a TensorFlow graph.

So the measured time contains no calls from Python.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from benchmarks.all_reduce.ranks import rank


def serve_reduction(
    arguments: rank.Arguments, reduce: Callable[[Any, Any], Any], device: str
) -> None:
    """Executes the driver's commands with a TensorFlow operation.

    Args:
        arguments: the arguments of the command line.
        reduce: a function that takes a tensor and a scalar key, adds an all-reduce of the tensor to
            the graph, and returns the sum. The key identifies the all-reduce: it is the same on all
            ranks, and different for each all-reduce.
        device: the device on which the operation runs.
    """
    spec = tf.TensorSpec([None], tf.float32)
    number = tf.TensorSpec([], tf.int32)

    @tf.function(input_signature=[spec, number])
    def once(data: Any, key: Any) -> Any:
        with tf.device(device):
            return reduce(data, key)

    @tf.function(input_signature=[spec, number, number])
    def repeat(data: Any, key: Any, repetitions: Any) -> Any:
        with tf.device(device):
            _, data = tf.while_loop(
                lambda i, _: i < repetitions,
                lambda i, data: (i + 1, tf.ensure_shape(reduce(data, key + i), [None])),
                [0, data],
                parallel_iterations=1,
            )
            return data[0]

    key = 0
    data = tf.zeros([0])
    pattern = np.zeros(0, np.float32)

    def new_key(count: int = 1) -> Any:
        nonlocal key
        key += count
        return tf.constant(key - count + 1, tf.int32)

    def check(size: int) -> int:
        nonlocal data, pattern
        count = size // 4
        if len(pattern) != count:
            pattern = np.resize(np.arange(1, rank.PERIOD + 1, dtype=np.float32), count)
            data = tf.zeros([count])
        repeat(data, new_key(), tf.constant(1))  # Traces the function before it is timed.
        result = once(tf.constant(pattern * np.float32(arguments.rank + 1)), new_key())
        return int(np.count_nonzero(result.numpy() != pattern * np.float32(arguments.factor)))

    def measure(repetitions: int) -> float:
        first, following = new_key(), new_key(repetitions)
        once(tf.zeros([1]), first)  # A barrier, so that all ranks begin at the same time.
        start = time.perf_counter()
        repeat(data, following, tf.constant(repetitions)).numpy()
        return time.perf_counter() - start

    rank.serve(arguments, check, measure)
