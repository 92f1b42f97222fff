"""Puts all hooks into Keras, once."""

from __future__ import annotations

import functools

from tfdist.trainer import (
    adapting,
    calls,
    compression_files,
    coupled_losses,
    files,
    loops,
    losses,
    metrics,
    mixing,
    nested_functions,
    noise,
    noise_of_batch,
    older_keras,
    optimizers,
    sharded_averages,
    sharded_files,
    sharded_optimizers,
    writers,
)


@functools.cache
def install() -> None:
    """Makes Keras's training right under tfdist strategies; elsewhere it stays as it is."""
    losses.install()
    coupled_losses.install()
    metrics.install()
    mixing.install()
    nested_functions.install()
    noise.install()
    noise_of_batch.install()
    older_keras.install()
    # Below the other hooks of optimizers, which go around them.
    sharded_optimizers.install()
    sharded_averages.install()
    optimizers.install()
    loops.install()
    calls.install()
    adapting.install()
    files.install()
    sharded_files.install()
    compression_files.install()
    writers.install()
