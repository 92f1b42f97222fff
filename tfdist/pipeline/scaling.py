"""The scale of the loss, where an optimizer changes it from step to step."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdist.pipeline.engine import Engine
from tfdist.pipeline.strategy import HybridStrategy


def loss_scale(optimizer: Any, strategy: HybridStrategy, engine: Engine) -> tf.Tensor:
    """By what the gradients of a step are larger, the same on all ranks; a float32 scalar.

    Args:
        optimizer: this rank's.
        strategy: the pipeline's; its ranks call this together.
        engine: which knows the ranks that train anything.
    """
    scale = tf.cast(optimizer.scale_loss(tf.constant(1.0)), tf.float32)
    trains = engine.places_that_train
    if hasattr(optimizer, "inner_optimizer") and 0 < len(trains) < strategy.pipeline_size:
        # The others' optimizers are not applied, and so do not follow.
        communicator: Any = strategy.pipeline_communicator
        scale = communicator.broadcast(scale, trains[-1])
    return scale
