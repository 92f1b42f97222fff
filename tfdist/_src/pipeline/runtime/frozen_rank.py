"""How a rank with nothing to train stays in step with the other ranks' optimizers."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdist._src.internals.optimizer import batches_of, inner_optimizer, scales_losses
from tfdist._src.pipeline.placement.strategy import HybridStrategy
from tfdist._src.pipeline.runtime.engine import Engine
from tfdist._src.strategy.step import Step


def loss_scale(optimizer: Any, strategy: HybridStrategy, engine: Engine) -> tf.Tensor:
    """The loss scale of this step, identical on all ranks; a float32 scalar.

    Collective over the pipeline's ranks.

    Args:
        optimizer: this rank's optimizer.
        strategy: the pipeline's strategy.
        engine: this rank's engine, which knows the ranks that train.
    """
    scale = tf.cast(optimizer.scale_loss(tf.constant(1.0)), tf.float32)
    trains = engine.training_ranks
    if scales_losses(optimizer) and 0 < len(trains) < strategy.pipeline_size:
        # The optimizers of the remaining ranks are not applied, so their scale is stale.
        communicator: Any = strategy.pipeline_communicator
        scale = communicator.broadcast(scale, trains[-1])
    return scale


def participate_without_update(optimizer: Any, step: Step, overflowed: tf.Tensor) -> None:
    """Counts a step and takes part in the collectives of the ranks that train.

    Args:
        optimizer: this rank's optimizer, which has no gradients.
        step: this rank's step.
        overflowed: whether the other ranks' optimizers skip the step.
    """
    inner = inner_optimizer(optimizer)

    def clip() -> None:
        step.clip_by_global_norm([], [], inner.global_clipnorm)

    def count() -> None:
        batches = batches_of(inner)
        if inner.global_clipnorm:
            due = tf.equal((batches + 1) % (inner.gradient_accumulation_steps or 1), 0)
            tf.cond(due, clip, lambda: None)
        batches.assign_add(1)

    tf.cond(overflowed, lambda: None, count)
