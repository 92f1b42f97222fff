"""A layer that waits in its passes instead of computing, so that many stages share few cores."""

from __future__ import annotations

import time
from typing import Any

import keras
import numpy as np
import tensorflow as tf


class Wait(keras.layers.Layer):  # type: ignore[misc]
    """Multiplies by a weight and waits, in each of its three passes.

    Args:
        seconds: the wait of each pass: the forward pass, the input gradient and the weight
            gradient.
        **kwargs: arguments of `keras.layers.Layer`.
    """

    def __init__(self, seconds: float, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.seconds = seconds

    def build(self, input_shape: Any) -> None:
        """Creates the weight."""
        self.weight = self.add_weight(shape=[1], initializer="ones")

    def call(self, x: Any) -> Any:
        """Maps `[rows, 1]` to `[rows, 1]`."""
        seconds = self.seconds

        @tf.custom_gradient  # type: ignore[untyped-decorator]
        def multiply(x: Any, weight: Any) -> Any:
            def gradient(upstream: Any) -> Any:
                of_input = wait(upstream * weight, seconds)
                with tf.control_dependencies([of_input]):  # One after the other, as on one core.
                    of_weight = wait(upstream * x, seconds)
                return of_input, tf.reshape(tf.reduce_sum(of_weight), [1])

            return wait(x * weight, seconds), gradient

        return multiply(x, tf.convert_to_tensor(self.weight))


class _Clock:
    """Sleeps for the requested time on average: after a late end, the next sleep is shorter.

    Compensates at most a twentieth of the requested time. So a long delay, as on a busy machine, is
    not compensated.
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
    """Returns the same values after a wait."""
    if seconds == 0:
        return tf.identity(x)

    def sleep(values: np.ndarray) -> np.ndarray:
        _clock.sleep(seconds)
        return values

    later = tf.numpy_function(sleep, [x], x.dtype)
    later.set_shape(x.shape)
    return later
