"""Optimizers that sum the gradients over the replicas before they clip them.

Keras clips each replica's gradients and sums them afterwards, which is not what one process does.
Here the sum comes first: at the last moment before clipping, so that accumulated gradients cross
the network once per update; and before the check for overflow where the loss is scaled, so that
all replicas skip a step together.
"""

from __future__ import annotations

import threading
from typing import Any

import tensorflow as tf

from tfdist.internals.keras import BaseOptimizer, LossScaleOptimizer, TensorFlowOptimizer
from tfdist.strategies.extended import ReplicatedExtended
from tfdist.strategies.step import current_step


def install() -> None:
    """Replaces where Keras's optimizers sum gradients in a tfdist replica."""
    clip = BaseOptimizer._clip_gradients
    sum_gradients = TensorFlowOptimizer._all_reduce_sum_gradients
    apply_scaled = LossScaleOptimizer.apply

    def clip_sums(self: Any, grads: Any) -> Any:
        if _in_replica() and not _already.summed:
            grads = sum_over_replicas(grads)
        return clip(self, grads)

    def sum_unless_done(self: Any, grads_and_vars: Any) -> Any:
        return grads_and_vars if _in_replica() else sum_gradients(self, grads_and_vars)

    def apply_scaled_sums(self: Any, grads: Any, trainable_variables: Any = None) -> Any:
        if not _in_replica() or _already.summed:
            return apply_scaled(self, grads, trainable_variables)
        grads = sum_over_replicas(grads)
        _already.summed = True
        try:
            return apply_scaled(self, grads, trainable_variables)
        finally:
            _already.summed = False

    BaseOptimizer._clip_gradients = clip_sums
    TensorFlowOptimizer._all_reduce_sum_gradients = sum_unless_done
    LossScaleOptimizer.apply = apply_scaled_sums


def sum_over_replicas(grads: Any) -> list[Any]:
    """Sums gradients over all replicas; None stays None."""
    present = [g for g in grads if g is not None]
    if not present:
        return list(grads)
    step = current_step()
    if step is not None:
        present = step.zero_without_rows(present)
    context = tf.distribute.get_replica_context()
    sums = iter(context.all_reduce(tf.distribute.ReduceOp.SUM, present))
    return [None if g is None else next(sums) for g in grads]


class _Already(threading.local):
    summed = False


_already = _Already()


def _in_replica() -> bool:
    context = tf.distribute.get_replica_context()
    if context is None or context.num_replicas_in_sync == 1:
        return False
    return isinstance(context.strategy.extended, ReplicatedExtended)
