"""Optimizers that weigh the gradients by rows, and sum them over the replicas before they clip.

Keras clips each replica's gradients and sums them afterwards, which is not what one process does.
Here the sum comes first: at the last moment before clipping, so that accumulated gradients cross
the network once per update; and before the check for overflow where the loss is scaled, so that
all replicas skip a step together.
"""

from __future__ import annotations

import collections
import functools
import threading
from typing import Any

import tensorflow as tf

from tfdist.errors import UnsupportedError
from tfdist.internals.keras import BaseOptimizer, LossScaleOptimizer, TensorFlowOptimizer
from tfdist.sharding.sharded import sharded_by, shares_out, trained_by
from tfdist.strategies import reduction
from tfdist.strategies.step import current_step
from tfdist.trainer.replicas import (
    compressor_in_use,
    in_replica,
    not_finite_anywhere,
    sum_over_replicas,
    weigh,
    with_nan,
)
from tfdist.trainer.sharded_optimizers import clip_shards


def install() -> None:
    """Replaces where Keras's optimizers weigh and sum gradients in a tfdist replica."""
    BaseOptimizer.scale_loss = _weighing(BaseOptimizer.scale_loss)
    LossScaleOptimizer.scale_loss = _weighing(LossScaleOptimizer.scale_loss)
    clip = BaseOptimizer._clip_gradients
    sum_gradients = TensorFlowOptimizer._all_reduce_sum_gradients
    apply_gradients = BaseOptimizer._backend_apply_gradients
    apply_scaled = LossScaleOptimizer.apply

    def apply_known(self: Any, grads: Any, trainable_variables: Any) -> None:
        outer, _here.variables = getattr(_here, "variables", ()), trainable_variables
        try:
            apply_gradients(self, grads, trainable_variables)
        finally:
            _here.variables = outer

    def clip_sums(self: Any, grads: Any) -> Any:
        sharded = sharded_by(self)
        if sharded is not None:
            return clip_shards(self, sharded, grads, _here.variables, clip)
        if in_replica() and not _already_summed[id(self)]:
            grads = sum_over_replicas(self, grads, _here.variables)
        step = current_step()
        if step is not None and self.global_clipnorm:
            return step.clip_by_global_norm(grads, _here.variables, self.global_clipnorm)
        return clip(self, grads)

    def sum_unless_done(self: Any, grads_and_vars: Any) -> Any:
        return grads_and_vars if in_replica() else sum_gradients(self, grads_and_vars)

    def apply_scaled_sums(self: Any, grads: Any, trainable_variables: Any = None) -> Any:
        if not in_replica():
            return apply_scaled(self, grads, trainable_variables)
        step = current_step()
        agreed = step is not None and step.agreed_on_overflow
        if agreed or compressor_in_use() is not None or shares_out(self):
            # What is lost must not be scaled by what changes from step to step, nor come from a
            # step that is skipped; so all agree to skip first, and sum what is no longer scaled.
            if step is not None:
                grads = weigh(step, self, grads)
                step.weighed.add(id(self.inner_optimizer))
            if not agreed:
                broken = not_finite_anywhere(grads, reduction.sum_over_replicas)
                grads = with_nan(grads, broken)
            return apply_scaled(self, grads, trainable_variables)
        grads = sum_over_replicas(self, grads)
        # Keras may go on in other threads, where replicas are merged.
        inner = id(self.inner_optimizer)
        _note_summed(inner, 1)
        try:
            return apply_scaled(self, grads, trainable_variables)
        finally:
            _note_summed(inner, -1)

    BaseOptimizer._backend_apply_gradients = apply_known
    BaseOptimizer._clip_gradients = clip_sums
    TensorFlowOptimizer._all_reduce_sum_gradients = sum_unless_done
    BaseOptimizer.apply = _unrecorded(_prepared(BaseOptimizer.apply))
    LossScaleOptimizer.apply = _unrecorded(_prepared(apply_scaled_sums))


def _unrecorded(apply: Any) -> Any:
    # What optimizers write is the same on all replicas already.
    @functools.wraps(apply)
    def apply_unrecorded(self: Any, grads: Any, trainable_variables: Any = None) -> Any:
        step = current_step()
        if step is None:
            return apply(self, grads, trainable_variables)
        written = dict(step.written)
        try:
            return apply(self, grads, trainable_variables)
        finally:
            step.written = written

    return apply_unrecorded


def _prepared(apply: Any) -> Any:
    # Variables cannot be made inside the conditionals of an optimizer.
    @functools.wraps(apply)
    def apply_prepared(self: Any, grads: Any, trainable_variables: Any = None) -> Any:
        compressor = compressor_in_use()
        if compressor is not None and tf.distribute.get_strategy().extended._use_merge_call():
            raise UnsupportedError(
                "Gradients of several devices per worker cannot be compressed eagerly. Compile "
                "the model with run_eagerly=False, or leave `compression` out."
            )
        if compressor is not None and (self.built or trainable_variables is not None):
            if not self.built:
                self.build(list(trainable_variables))
            own = getattr(self, "inner_optimizer", self)
            grads = list(grads)
            trained = trained_by(own)
            given = zip(grads, trainable_variables or trained, strict=False)
            sparse = [v for g, v in given if isinstance(g, tf.IndexedSlices)]
            step = current_step()
            elsewhere = [v for v in trained if step is not None and not step.sums(v)]
            compressor.prepare(own, trained, sparse, elsewhere)
        return apply(self, grads, trainable_variables)

    return apply_prepared


def _weighing(scale_loss: Any) -> Any:
    # Keras scales the loss just before the backward pass: one multiplication weighs all gradients.
    @functools.wraps(scale_loss)
    def scale_weighed_loss(self: Any, loss: Any) -> Any:
        step = current_step()
        if step is not None:
            step.weighed.add(id(self))
            loss = step.weigh(tf.convert_to_tensor(loss))
        return scale_loss(self, loss)

    return scale_weighed_loss


# Eagerly, the replicas of one worker run at the same time, each in a thread.
_here = threading.local()
_already_summed: collections.Counter[int] = collections.Counter()
_summing = threading.Lock()


def _note_summed(optimizer: int, change: int) -> None:
    with _summing:
        _already_summed[optimizer] += change
