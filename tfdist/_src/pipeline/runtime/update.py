"""The end of a training step: gradients are summed over copies, and then variables are updated."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdist._src.internals.optimizer import scales_losses
from tfdist._src.keras.optimizers.gradient_sync import not_finite_anywhere, with_nan
from tfdist._src.keras.optimizers.late_update import LateUpdate
from tfdist._src.pipeline.placement.strategy import HybridStrategy
from tfdist._src.pipeline.runtime.engine import Engine
from tfdist._src.pipeline.runtime.frozen_rank import participate_without_update
from tfdist._src.sharding.sharded import is_sharded
from tfdist._src.strategy import reduction
from tfdist._src.strategy.step import Step


def prepare_update(model: Any, strategy: HybridStrategy, engine: Engine, step: Step) -> LateUpdate:
    """Communicates what does not depend on the optimizer; returns what is left to do.

    Args:
        model: the PipelineModel.
        strategy: its strategy.
        engine: this rank's engine, whose gradients are complete.
        step: the step.
    """
    optimizer = model.optimizer
    variables = model.trainable_variables
    gradients = [engine.sums.of(v) for v in variables]
    gradients = engine.shared_variables.sum_gradients(variables, gradients)
    overflowed = tf.constant(False)
    if scales_losses(optimizer):

        def add_up(value: tf.Tensor) -> Any:
            total = strategy.pipeline_communicator.all_reduce([value])[0]
            return reduction.sum_over_replicas(total)

        gradients = step.own_parts(gradients)
        overflowed = not_finite_anywhere(gradients, add_up)
        gradients = with_nan(gradients, overflowed)
        step.agreed_on_overflow = True
    pairs = [(g, v) for g, v in zip(gradients, variables, strict=True) if g is not None]
    changes = engine.shared_variables.sum_state_changes()

    def apply() -> None:
        if pairs:
            optimizer.apply_gradients(pairs)
        else:
            participate_without_update(optimizer, step, overflowed)
        if is_sharded(optimizer):
            engine.shared_variables.broadcast_from_owners()

    return LateUpdate(
        apply,
        optimizer,
        gradients=(),  # The step has waited for them already.
        operations=len(tf.compat.v1.get_default_graph().get_operations()),
        communicated=list(changes),
    )
