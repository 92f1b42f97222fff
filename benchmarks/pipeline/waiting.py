"""A layer that waits instead of computing, so that many stages can share few cores."""

from __future__ import annotations

import time
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist._src.global_view.rules import RULES


class Wait(keras.layers.Layer):  # type: ignore[misc]
    """A layer that multiplies its input by a scalar weight, and then waits.

    The layer waits three times in a step: in the forward pass, when it computes the input gradient,
    and when it computes the weight gradient.

    Args:
        seconds: the duration of each of these three waits.
        **kwargs: arguments of `keras.layers.Layer`.
    """

    def __init__(self, seconds: float, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.seconds = seconds

    def build(self, input_shape: Any) -> None:
        """Creates the weight."""
        self.weight = self.add_weight(shape=[1], initializer="ones")

    def call(self, x: Any) -> Any:
        """Multiplies a tensor of shape `[rows, 1]` by the weight."""
        seconds = self.seconds

        @tf.custom_gradient  # type: ignore[untyped-decorator]
        def multiply(x: Any, weight: Any) -> Any:
            def gradient(upstream: Any) -> Any:
                of_input = wait(upstream * weight, seconds)
                # The two waits must not overlap, because on one core, computations do not overlap.
                with tf.control_dependencies([of_input]):
                    of_weight = wait(upstream * x, seconds)
                return of_input, tf.reshape(tf.reduce_sum(of_weight), [1])

            return wait(x * weight, seconds), gradient

        return multiply(x, tf.convert_to_tensor(self.weight))


class _Clock:
    """Sleeps for the requested time on average.

    A sleep usually takes longer than requested. The clock makes the next sleep shorter by the same
    time, but by at most a twentieth of the requested time. So it does not compensate long delays,
    such as delays on a busy machine.
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
    """Adds an operation to the graph that waits, and then outputs its input."""
    if seconds == 0:
        return tf.identity(x)

    # A stage receives its rows in microbatches, so it refuses Python functions, which may depend on
    # all rows. In these models, the only Python function treats each row in the same way.
    RULES["PyFunc"] = RULES["Relu"]

    def sleep(values: np.ndarray) -> np.ndarray:
        _clock.sleep(seconds)
        return values

    later = tf.numpy_function(sleep, [x], x.dtype)
    later.set_shape(x.shape)
    return later
