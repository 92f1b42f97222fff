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
from tfdist.strategies.extended import ReplicatedExtended
from tfdist.strategies.step import Step, current_step


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
        if _in_replica() and not _already_summed[id(self)]:
            grads = sum_over_replicas(self, grads, _here.variables)
        return clip(self, grads)

    def sum_unless_done(self: Any, grads_and_vars: Any) -> Any:
        return grads_and_vars if _in_replica() else sum_gradients(self, grads_and_vars)

    def apply_scaled_sums(self: Any, grads: Any, trainable_variables: Any = None) -> Any:
        if not _in_replica():
            return apply_scaled(self, grads, trainable_variables)
        if _compressor() is not None:
            # What is lost must not be scaled by what changes from step to step, nor come from a
            # step that is skipped; so all agree to skip first, and sum what is no longer scaled.
            step = current_step()
            if step is not None and id(self) in step.weighed:
                step.weighed.add(id(self.inner_optimizer))
            return apply_scaled(self, _not_finite_together(grads), trainable_variables)
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
        compressor = _compressor()
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
            given = zip(grads, trainable_variables or own._trainable_variables, strict=False)
            sparse = [v for g, v in given if isinstance(g, tf.IndexedSlices)]
            compressor.prepare(own, own._trainable_variables, sparse)
        return apply(self, grads, trainable_variables)

    return apply_prepared


def _compressor() -> Any:
    if not _in_replica():
        return None
    compressor = tf.distribute.get_strategy().extended.compressor
    return compressor if compressor is not None and compressor.active else None


def _not_finite_together(gradients: Any) -> list[Any]:
    """Makes a gradient NaN on all replicas where any gradient is not finite on one."""
    grads: list[Any] = list(gradients)
    present = [i for i, g in enumerate(grads) if g is not None]
    if not present:
        return grads
    finite = [tf.reduce_all(tf.math.is_finite(_values(grads[i]))) for i in present]
    broken = tf.cast(tf.logical_not(tf.reduce_all(finite)), tf.int32)
    context = tf.distribute.get_replica_context()
    anywhere = context.all_reduce(tf.distribute.ReduceOp.SUM, broken) > 0
    dense = [i for i in present if not isinstance(grads[i], tf.IndexedSlices)]
    marked = next((i for i in dense if 0 not in grads[i].shape), present[0])
    grads[marked] = _marked(grads[marked], anywhere)
    return grads


def _marked(gradient: Any, broken: tf.Tensor) -> Any:
    """The gradient, or one that is not a number."""
    values = _values(gradient)
    nan = tf.cast(float("nan"), values.dtype)
    if not isinstance(gradient, tf.IndexedSlices):
        return tf.where(broken, nan, values)
    # It may have no rows on this replica.
    row = tf.fill(tf.concat([[1], tf.shape(values)[1:]], axis=0), nan)
    first = tf.zeros([1], gradient.indices.dtype)
    more = tf.cast(broken, tf.int32)
    return tf.IndexedSlices(
        tf.concat([values, row[:more]], axis=0),
        tf.concat([gradient.indices, first[:more]], axis=0),
        gradient.dense_shape,
    )


def _values(gradient: Any) -> tf.Tensor:
    return gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient


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


def sum_over_replicas(optimizer: Any, grads: Any, variables: Any = ()) -> list[Any]:
    """Sums an optimizer's gradients over all replicas, weighted by rows; None stays None.

    Args:
        optimizer: whose gradients they are.
        grads: tensors, `tf.IndexedSlices` or None.
        variables: for each gradient its variable, for those that may be compressed.
    """
    present = [g for g in grads if g is not None]
    if not present:
        return list(grads)
    step = current_step()
    if step is not None:
        present = _weigh(step, optimizer, present)
    context = tf.distribute.get_replica_context()
    exact = functools.partial(context.all_reduce, tf.distribute.ReduceOp.SUM)
    compressor = _compressor()
    if compressor is None or not variables:
        sums = iter(exact(present))
    else:
        owners = [v for g, v in zip(grads, variables, strict=True) if g is not None]
        sums = iter(compressor.sum(optimizer, present, owners, exact))
    return [None if g is None else next(sums) for g in grads]


def _weigh(step: Step, optimizer: Any, grads: list[Any]) -> list[Any]:
    if id(optimizer) in step.weighed:
        return step.zero_without_rows(grads)
    return [
        tf.IndexedSlices(step.weigh(g.values), g.indices, g.dense_shape)
        if isinstance(g, tf.IndexedSlices)
        else step.weigh(g)
        for g in grads
    ]


# Eagerly, the replicas of one worker run at the same time, each in a thread.
_here = threading.local()
_already_summed: collections.Counter[int] = collections.Counter()
_summing = threading.Lock()


def _note_summed(optimizer: int, change: int) -> None:
    with _summing:
        _already_summed[optimizer] += change


def _in_replica() -> bool:
    context = tf.distribute.get_replica_context()
    if context is None or context.num_replicas_in_sync == 1:
        return False
    return isinstance(context.strategy.extended, ReplicatedExtended)
