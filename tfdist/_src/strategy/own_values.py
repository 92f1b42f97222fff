"""Marks the parts of a whole-batch program in which each replica computes with its own rows.

In the traced program, the functions of this module return their input and mark it. The package
`global_view` interprets the marks when it partitions the program. The backward pass leaves such a
part where the forward pass enters it, and enters the part where the forward pass leaves it.
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
    """Returns the axes along which a replica may have only a part of a tensor.

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
        like: a tensor with the same rows as `value`, such as `value` itself.
        axes: the axes that may be cut. The static sizes of the result along these axes are unknown.
    """
    with marking_operations(PER_WORKER_BEGIN, axes):
        result = identities([value, like], "TfdistEnter")[0]
    # If the static sizes were known, TensorFlow would use them in gradients.
    return of_unknown_sizes(result, axes)


def enter_whole(value: tf.Tensor) -> tf.Tensor:
    """Passes a value that is the same on all replicas, such as a weight, to a marked part."""
    with marking_operations(PER_WORKER_BEGIN, []):
        (result,) = identities([value], "TfdistEnterWhole")
    return result


def leave(value: tf.Tensor, like: tf.Tensor, axes: Sequence[int]) -> tf.Tensor:
    """Returns a tensor for the whole batch, which consists of the rows of all replicas.

    Args:
        value: a replica's rows.
        like: a tensor of the program for the whole batch, with the same rows and shape.
        axes: the axes that may be cut.
    """
    with marking_operations(PER_WORKER_END, axes):
        result = identities([value, like], "TfdistLeave")[0]
    result.set_shape(like.shape)
    return result


def average(value: tf.Tensor) -> tf.Tensor:
    """Returns the mean of the replicas' values, weighted by their numbers of rows.

    The mean is not differentiable.

    Args:
        value: a replica's value. If it is not floating-point, it must be equal on all replicas.
    """
    value = tf.stop_gradient(value)
    with marking_operations(AVERAGE if value.dtype.is_floating else EQUAL):
        (result,) = tf.raw_ops.IdentityN(input=[value])
    return result


def stack(value: tf.Tensor) -> tf.Tensor:
    """Stacks the values of all replicas along a new first axis.

    The values of replicas without rows are replaced by zeros. The gradient is computed as if there
    were only one replica.

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
