"""Puts all hooks into Keras, once."""

from __future__ import annotations

import functools

import keras

from tfdist.trainer import files, loops, losses, metric_state, noise, optimizers, writers


@functools.cache
def install() -> None:
    """Makes Keras's training right under tfdist strategies; elsewhere it stays as it is.

    Raises:
        RuntimeError: Keras runs on another backend than TensorFlow.
    """
    if keras.backend.backend() != "tensorflow":
        raise RuntimeError(
            "tfdist needs Keras on its TensorFlow backend. "
            f"Received: KERAS_BACKEND={keras.backend.backend()!r}. "
            "Set the environment variable KERAS_BACKEND=tensorflow before Keras is imported."
        )
    losses.install()
    noise.install()
    metric_state.install()
    optimizers.install()
    loops.install()
    files.install()
    writers.install()
