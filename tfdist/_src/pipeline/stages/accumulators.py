"""Gradients accumulated in place over the microbatches."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf

from tfdist._src.sharding.shard import local_variables


class GradientSums:
    """The sums of the variables' gradients in a step; those of lookups stay sparse.

    A dense one has an accumulator, to which a stage's backward pass adds a gradient as soon as it
    is computed, so that memory holds the sums but never all gradients of a microbatch as well.

    Args:
        device: the device that holds the accumulators.
    """

    def __init__(self, device: str) -> None:
        self._device = device
        self._dense: dict[int, tf.Variable] = {}
        self._active: dict[int, tf.Variable] = {}
        self._sparse: dict[int, list[tf.IndexedSlices]] = {}
        with local_variables(device):
            self._zero = tf.Variable(0.0, trainable=False, name="zero")

    @property
    def variables(self) -> list[tf.Variable]:
        """The accumulators, whose values do not outlast a step."""
        return list(self._dense.values())

    def accumulator(self, variable: Any, gradient: tf.Tensor) -> tf.Variable:
        """The accumulator of a variable's dense gradient."""
        if id(variable) not in self._dense:
            with local_variables(self._device):
                zeros = tf.zeros(variable.shape, gradient.dtype)
                self._dense[id(variable)] = tf.Variable(zeros, trainable=False, name="gradient_sum")
        return self._dense[id(variable)]

    def begin(self, variables: Iterable[Any]) -> None:
        """Begins a step, in the graph being traced.

        Args:
            variables: the variables with a dense gradient in this step.
        """
        self._sparse = {}
        self._active = {id(v): self._dense[id(v)] for v in variables}
        # Zeros known when tracing would become constants that stay in memory beside the sums.
        zero = self._zero.read_value()
        done: list[Any] = []
        for accumulator in self._active.values():
            # One after the other, so that only one at a time exists twice.
            with tf.control_dependencies(done):
                zeros = tf.fill(accumulator.shape, tf.cast(zero, accumulator.dtype))
                done = [accumulator.assign(zeros, read_value=False)]

    def add(self, variables: Sequence[Any], gradients: Sequence[Any]) -> None:
        """Adds the sparse gradients of a microbatch; the others may be None."""
        for variable, gradient in zip(variables, gradients, strict=True):
            if isinstance(gradient, tf.IndexedSlices):
                self._sparse.setdefault(id(variable), []).append(gradient)

    def of(self, variable: Any) -> Any:
        """The sum for a variable: a tensor, `tf.IndexedSlices` or None."""
        accumulator, slices = self._active.get(id(variable)), self._sparse.get(id(variable))
        dense = None if accumulator is None else accumulator.read_value()
        if slices is None:
            return dense
        sparse = slices[0]
        if len(slices) > 1:
            sparse = tf.IndexedSlices(
                tf.concat([s.values for s in slices], axis=0),
                tf.concat([s.indices for s in slices], axis=0),
                slices[0].dense_shape,
            )
        return sparse if dense is None else dense + tf.convert_to_tensor(sparse)
