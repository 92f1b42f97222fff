"""Puts all hooks into Keras, once."""

from __future__ import annotations

import functools

from tfdist.trainer import (
    calls,
    compression_files,
    epochs,
    files,
    loops,
    losses,
    metrics,
    noise,
    older_keras,
    optimizers,
    own_callbacks,
    sharded_averages,
    sharded_files,
    sharded_optimizers,
    writers,
)


@functools.cache
def install() -> None:
    """Makes Keras's training right under tfdist strategies; elsewhere it stays as it is."""
    losses.install()
    metrics.install()
    noise.install()
    older_keras.install()
    # Below the other hooks of optimizers, which go around them.
    sharded_optimizers.install()
    sharded_averages.install()
    optimizers.install()
    loops.install()
    calls.install()
    epochs.install()
    own_callbacks.install()
    files.install()
    sharded_files.install()
    compression_files.install()
    writers.install()
