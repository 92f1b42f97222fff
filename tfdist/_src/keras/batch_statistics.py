"""Computes the means and variances of `BatchNormalization` layers over the global batch.

By default, the statistics cover the rows of all replicas. Usually, each replica computes the
statistics of its own rows, and one gather per layer combines the statistics of all replicas. With
`batch_statistics="replica"`, each replica normalizes its rows with the statistics of these rows
only.
"""

import functools
import inspect
from typing import Any

import keras
import tensorflow as tf

from tfdist._src.internals.graphs import identities, marking_operations
from tfdist._src.internals.keras import exact_value, in_symbolic_scope
from tfdist._src.keras.patching import patch
from tfdist._src.strategy import own_values
from tfdist._src.strategy.step import GlobalStep, current_step, equal_everywhere

_AXIS = "_tfdist_axis"


def install() -> None:
    """Replaces how `BatchNormalization` computes statistics inside a tfdist step."""
    patch("BatchNormalization._moments", _gathered)
    patch("BatchNormalization.call", _of_own_rows)


def _of_own_rows(keras_call: Any) -> Any:
    signature = inspect.signature(keras_call)

    @functools.wraps(keras_call)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(self, *args, **kwargs)
        step, given = _traced_step(), bound.arguments
        inputs, mask = given["inputs"], given.get("mask")
        if step is None or not (step.own_statistics and given.get("training") and self.trainable):
            return keras_call(self, *args, **kwargs)
        if self.synchronized or not isinstance(inputs, tf.Tensor):
            return keras_call(self, *args, **kwargs)
        axes = own_values.axes_that_may_be_cut(inputs, step.static_rows, [self.axis])
        given["inputs"] = own_values.enter(inputs, inputs, axes)
        if mask is not None:
            given["mask"] = own_values.enter(
                mask, mask, own_values.axes_that_may_be_cut(mask, step.static_rows, [])
            )
        variables = self.variables
        state = [(v, own_values.enter_whole(exact_value(v))) for v in variables]
        with keras.StatelessScope(state, initialize_variables=False) as scope:
            before = [scope.get_current_value(v) for v in variables]
            outputs = keras_call(*bound.args, **bound.kwargs)
            after = [scope.get_current_value(v) for v in variables]
        for variable, old, new in zip(variables, before, after, strict=True):
            if new is not old:
                variable.assign(new if step.assigns_own_statistics else own_values.average(new))
        return own_values.leave(outputs, inputs, axes)

    return call


def _gathered(keras_moments: Any) -> Any:
    @functools.wraps(keras_moments)
    def moments(self: Any, inputs: Any, mask: Any) -> Any:
        step = _traced_step()
        if step is None or not step.gathers_statistics or mask is not None:
            return keras_moments(self, inputs, mask)
        if step.own_statistics and not self.synchronized:
            return keras_moments(self, inputs, mask)
        if not isinstance(inputs, tf.Tensor) or inputs.dtype not in (tf.float32, tf.float64):
            return keras_moments(self, inputs, mask)
        return moments_of_all_rows(inputs, self.axis, step.static_rows)

    return moments


def _traced_step() -> GlobalStep | None:
    """Returns the step that is being traced for the global batch; None outside of such a trace."""
    step = current_step()
    if not isinstance(step, GlobalStep) or tf.executing_eagerly() or in_symbolic_scope():
        return None
    return step


def moments_of_all_rows(x: tf.Tensor, axis: int, rows: int | None) -> tuple[tf.Tensor, tf.Tensor]:
    """Computes the means and variances of a global batch for each index along an axis.

    Each replica computes the moments of its own rows. The replicas then gather all moments and
    combine them with the formulas of Chan, Golub and LeVeque, Updating Formulae and a Pairwise
    Algorithm for Computing Sample Variances (1979).

    Args:
        x: a tensor of the program that is being traced for the global batch.
        axis: the axis to keep, such as the channels. The moments are computed over all other axes.
        rows: the number of rows of the global batch; None if it is unknown during the trace.
    """
    axis %= x.shape.rank
    others = [a for a in range(x.shape.rank) if a != axis]
    own = own_values.enter(x, x, own_values.axes_that_may_be_cut(x, rows, [axis]))
    own_mean = tf.reduce_mean(own, others, keepdims=True)
    distances = tf.math.squared_difference(own, tf.stop_gradient(own_mean))
    own_variance = tf.reduce_mean(distances, others)
    size = own_variance.shape[0]
    count = tf.cast(tf.size(own, tf.int64) // size, x.dtype)
    everyone = own_values.stack(tf.concat([[count], tf.reshape(own_mean, [size]), own_variance], 0))
    counts, means, variances = tf.split(everyone, [1, size, size], axis=1)
    weights = counts / tf.reduce_sum(counts)
    mean = tf.reduce_sum(weights * means, axis=0)
    variance = tf.reduce_sum(weights * (variances + tf.square(means - mean)), axis=0)
    # The gradient that is registered for `TfdistMoments` flows directly to `x` and bypasses the
    # operations above. In a graph that `tf.vectorized_map` has copied, TensorFlow does not use the
    # registered gradient. It differentiates the operations above instead, which also gives the
    # gradient for the global batch.
    with marking_operations(_AXIS, [axis]):
        mean, variance, _ = identities([mean, variance, x], "TfdistMoments")
    return mean, variance


@tf.RegisterGradient("TfdistMoments")  # type: ignore[untyped-decorator]
def _gradient_of_moments(
    op: tf.Operation, of_mean: tf.Tensor, of_variance: tf.Tensor, _: tf.Tensor
) -> list[Any]:
    x, mean = op.inputs[2], op.outputs[0]
    (axis,) = op.get_attr(_AXIS)
    shape = [-1 if a == axis else 1 for a in range(x.shape.rank)]
    count = tf.cast(tf.size(x, tf.int64) // mean.shape[0], x.dtype)
    # `of_mean` is the gradient with respect to the mean. It is marked here as equal on all workers,
    # so that the workers communicate it together with the inputs of the variance's gradient.
    (of_mean,) = equal_everywhere([of_mean])
    of_mean, of_square = of_mean / count, 2 * of_variance / count
    # As in `tf.nn.moments`, the variance must depend only on `x` and not on the mean. This matters
    # for second-order gradients, so the gradient stops at `mean`.
    distance = x - tf.reshape(tf.stop_gradient(mean), shape)
    return [None, None, tf.reshape(of_mean, shape) + tf.reshape(of_square, shape) * distance]
