"""The gradients of replicas: weighed by their rows, summed, and known to overflow by all."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdist.strategies import reduction
from tfdist.strategies.extended import ReplicatedExtended
from tfdist.strategies.step import Step, current_step


def in_replica() -> bool:
    """Whether the caller is one of several replicas of a tfdist strategy."""
    context = tf.distribute.get_replica_context()
    if context is None or context.num_replicas_in_sync == 1:
        return False
    return isinstance(context.strategy.extended, ReplicatedExtended)


def compressor_in_use() -> Any:
    """What compresses the replicas' gradients; None where nothing does."""
    if not in_replica():
        return None
    compressor = tf.distribute.get_strategy().extended.compressor
    return compressor if compressor is not None and compressor.active else None


def sum_over_replicas(optimizer: Any, grads: Any, variables: Any = ()) -> list[Any]:
    """Sums an optimizer's gradients over all replicas, weighted by rows; None stays None.

    Args:
        optimizer: whose gradients they are.
        grads: tensors, `tf.IndexedSlices` or None.
        variables: for each gradient its variable, where they may be compressed or shared.
    """
    present = [g for g in grads if g is not None]
    if not present:
        return list(grads)
    step = current_step()
    if step is not None:
        present = weigh(step, optimizer, present)
    exact = reduction.sum_over_replicas
    compressor = compressor_in_use()

    def add_up(gradients: Sequence[Any], owners: Sequence[Any]) -> list[Any]:
        if compressor is None:
            return list(exact(list(gradients)))
        return list(compressor.sum(optimizer, gradients, owners, exact))

    if not variables:
        sums = iter(exact(present))
    else:
        owners = [v for g, v in zip(grads, variables, strict=True) if g is not None]
        by_step = add_up if step is None else functools.partial(step.sum_over_replicas, add_up)
        sums = iter(by_step(present, owners))
    return [None if g is None else next(sums) for g in grads]


def weigh(step: Step, optimizer: Any, grads: Sequence[Any]) -> list[Any]:
    """An optimizer's gradients, weighted by the replica's share of the rows; None stays None."""
    results = list(grads)
    present = [i for i, g in enumerate(results) if g is not None]
    if id(optimizer) in step.weighed:
        weighed = step.zero_without_rows([results[i] for i in present])
    else:
        weighed = [_weigh(step, results[i]) for i in present]
    for i, gradient in zip(present, weighed, strict=True):
        results[i] = gradient
    return results


def _weigh(step: Step, gradient: Any) -> Any:
    if not isinstance(gradient, tf.IndexedSlices):
        return step.weigh(gradient)
    return tf.IndexedSlices(step.weigh(gradient.values), gradient.indices, gradient.dense_shape)


def not_finite_anywhere(gradients: Any, add_up: Callable[[tf.Tensor], Any]) -> tf.Tensor:
    """Whether any gradient is not finite on any participant; a bool scalar.

    All of them call it, also one who has no gradients, for whom the others wait.

    Args:
        gradients: dense, `tf.IndexedSlices` or None.
        add_up: sums a number over the participants.
    """
    finite = [tf.reduce_all(tf.math.is_finite(_values(g))) for g in gradients if g is not None]
    broken: tf.Tensor = add_up(tf.cast(tf.logical_not(tf.reduce_all(finite)), tf.int32)) > 0
    return broken


def with_nan(gradients: Any, broken: tf.Tensor) -> list[Any]:
    """The gradients, one of them NaN where they are `broken` anywhere; Keras skips the step."""
    grads: list[Any] = list(gradients)
    present = [i for i, g in enumerate(grads) if g is not None]
    if not present:
        return grads
    dense = [i for i in present if not isinstance(grads[i], tf.IndexedSlices)]
    marked = next((i for i in dense if 0 not in grads[i].shape), present[0])
    grads[marked] = _marked(grads[marked], broken)
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
