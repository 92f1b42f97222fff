"""A layer whose passes wait instead of computing, so that many stages share few cores."""

from __future__ import annotations

import time
from typing import Any

import keras
import numpy as np
import tensorflow as tf


class Wait(keras.layers.Layer):  # type: ignore[misc]
    """Multiplies by a weight and waits, in each of its three passes.

    Args:
        seconds: that the forward pass, the gradient of the input and the gradient of the weight
            wait, each.
        **kwargs: as of `keras.layers.Layer`.
    """

    def __init__(self, seconds: float, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.seconds = seconds

    def build(self, input_shape: Any) -> None:
        """Makes the weight."""
        self.weight = self.add_weight(shape=[1], initializer="ones")

    def call(self, x: Any) -> Any:
        """`[rows, 1]` to `[rows, 1]`."""
        seconds = self.seconds

        @tf.custom_gradient  # type: ignore[untyped-decorator]
        def multiply(x: Any, weight: Any) -> Any:
            def gradient(upstream: Any) -> Any:
                of_input = wait(upstream * weight, seconds)
                with tf.control_dependencies([of_input]):  # One after the other, on one core.
                    of_weight = wait(upstream * x, seconds)
                return of_input, tf.reshape(tf.reduce_sum(of_weight), [1])

            return wait(x * weight, seconds), gradient

        return multiply(x, tf.convert_to_tensor(self.weight))


class _Clock:
    """Sleeps as long as asked for on average: what one sleep is late, the next is shorter.

    By little: one that comes much too late, on a busy machine, is not made up for.
    """

    def __init__(self) -> None:
        self._late = 0.0

    def sleep(self, seconds: float) -> None:
        begin = time.perf_counter()
        time.sleep(max(0.0, seconds - self._late))
        self._late += time.perf_counter() - begin - seconds
        self._late = min(self._late, seconds / 20)


_clock = _Clock()


def wait(x: tf.Tensor, seconds: float) -> tf.Tensor:
    """The same values, later."""
    if seconds == 0:
        return tf.identity(x)

    def sleep(values: np.ndarray) -> np.ndarray:
        _clock.sleep(seconds)
        return values

    later = tf.numpy_function(sleep, [x], x.dtype)
    later.set_shape(x.shape)
    return later
