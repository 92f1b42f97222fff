"""Boundaries between a program for the whole batch and a replica's computation on its own rows.

In the traced program, these functions return their input and mark it. The package `global_view`
interprets the marks when it partitions the program. Gradients cross the boundaries in the opposite
direction.
"""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist._src.global_view.rules import (
    AVERAGE,
    EQUAL,
    PER_WORKER_BEGIN,
    PER_WORKER_END,
    STACK,
    SUM,
)
from tfdist._src.internals.graphs import identities, marking_operations, of_unknown_sizes


def axes_that_may_be_cut(tensor: tf.Tensor, rows: int | None, kept: Sequence[int]) -> list[int]:
    """The axes of a tensor along which a replica may have only a part of it.

    Args:
        tensor: a tensor of the program for the whole batch.
        rows: the number of rows of the whole batch, if the program knows it.
        kept: axes that are never cut.
    """
    never = [axis % tensor.shape.rank for axis in kept]
    return [
        axis
        for axis, size in enumerate(tensor.shape)
        if axis not in never and (size is None or (rows and size % rows == 0))
    ]


def enter(value: tf.Tensor, like: tf.Tensor, axes: Sequence[int]) -> tf.Tensor:
    """Returns a replica's rows of a value.

    Args:
        value: a tensor of the program for the whole batch.
        like: a tensor with the same rows, such as the value itself.
        axes: the axes that may be cut. The result's sizes along these axes are unknown.
    """
    with marking_operations(PER_WORKER_BEGIN, axes):
        result = identities([value, like], "TfdistEnter")[0]
    # Otherwise TensorFlow would use the static sizes in gradients.
    return of_unknown_sizes(result, axes)


def enter_whole(value: tf.Tensor) -> tf.Tensor:
    """Returns a value that is the same on all replicas, such as a weight."""
    with marking_operations(PER_WORKER_BEGIN, []):
        (result,) = identities([value], "TfdistEnterWhole")
    return result


def leave(value: tf.Tensor, like: tf.Tensor, axes: Sequence[int]) -> tf.Tensor:
    """Returns a tensor of the program for the whole batch, made of the rows of all replicas.

    Args:
        value: a replica's rows.
        like: a tensor of the program with the same rows and the same shape.
        axes: the axes that may be cut.
    """
    with marking_operations(PER_WORKER_END, axes):
        result = identities([value, like], "TfdistLeave")[0]
    result.set_shape(like.shape)
    return result


def average(value: tf.Tensor) -> tf.Tensor:
    """Returns the mean of the replicas' values, weighted by row counts; not differentiable.

    Args:
        value: a replica's value. If it is not floating-point, it must be equal on all replicas.
    """
    value = tf.stop_gradient(value)
    with marking_operations(AVERAGE if value.dtype.is_floating else EQUAL):
        (result,) = tf.raw_ops.IdentityN(input=[value])
    return result


def stack(value: tf.Tensor) -> tf.Tensor:
    """Stacks the values of all replicas on a new first axis, with zeros for replicas without rows.

    The gradient is computed as if there were only one replica.

    Args:
        value: a replica's value.
    """
    value = of_unknown_sizes(value[tf.newaxis], [0])
    with marking_operations(STACK):
        (values,) = tf.raw_ops.IdentityN(input=[value])
    with marking_operations(EQUAL):
        (result,) = tf.raw_ops.IdentityN(input=[values])
    return result


@tf.RegisterGradient("TfdistEnter")  # type: ignore[untyped-decorator]
def _gradient_of_enter(op: tf.Operation, gradient: tf.Tensor, _: tf.Tensor) -> list[Any]:
    return [leave(gradient, op.inputs[1], op.get_attr(PER_WORKER_BEGIN)), None]


@tf.RegisterGradient("TfdistEnterWhole")  # type: ignore[untyped-decorator]
def _gradient_of_enter_whole(op: tf.Operation, gradient: tf.Tensor) -> list[Any]:
    with marking_operations(SUM):
        return identities([gradient], "TfdistSum")


@tf.RegisterGradient("TfdistLeave")  # type: ignore[untyped-decorator]
def _gradient_of_leave(op: tf.Operation, gradient: tf.Tensor, _: tf.Tensor) -> list[Any]:
    return [enter(gradient, op.inputs[1], op.get_attr(PER_WORKER_END)), None]


@tf.RegisterGradient("TfdistSum")  # type: ignore[untyped-decorator]
def _gradient_of_sum(op: tf.Operation, gradient: tf.Tensor) -> list[Any]:
    return [enter_whole(gradient)]
