"""How a rank that trains nothing keeps up with the optimizers of the others."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdist.internals.optimizer import batches_of, inner_optimizer, scales_losses
from tfdist.pipeline.placement.strategy import HybridStrategy
from tfdist.pipeline.runtime.engine import Engine
from tfdist.strategies.step import Step


def loss_scale(optimizer: Any, strategy: HybridStrategy, engine: Engine) -> tf.Tensor:
    """By what the gradients of a step are larger, the same on all ranks; a float32 scalar.

    Args:
        optimizer: this rank's.
        strategy: the pipeline's; its ranks call this together.
        engine: which knows the ranks that train anything.
    """
    scale = tf.cast(optimizer.scale_loss(tf.constant(1.0)), tf.float32)
    trains = engine.places_that_train
    if scales_losses(optimizer) and 0 < len(trains) < strategy.pipeline_size:
        # The others' optimizers are not applied, and so do not follow.
        communicator: Any = strategy.pipeline_communicator
        scale = communicator.broadcast(scale, trains[-1])
    return scale


def participate_without_update(optimizer: Any, step: Step, broken: tf.Tensor) -> None:
    """Counts a step, and takes part in what the ranks that train do together.

    Args:
        optimizer: this rank's, which has no gradients.
        step: this rank's.
        broken: whether the others' optimizers skip the step.
    """
    own = inner_optimizer(optimizer)

    def clip() -> None:
        step.clip_by_global_norm([], [], own.global_clipnorm)

    def count() -> None:
        batches = batches_of(own)
        if own.global_clipnorm:
            due = tf.equal((batches + 1) % (own.gradient_accumulation_steps or 1), 0)
            tf.cond(due, clip, lambda: None)
        batches.assign_add(1)

    tf.cond(broken, lambda: None, count)
