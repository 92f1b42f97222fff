"""The step context of a pipeline rank."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdist.jit import has_rows, is_compiled_here
from tfdist.pipeline.placement.strategy import HybridStrategy
from tfdist.pipeline.runtime.engine import Engine
from tfdist.strategies import reduction
from tfdist.strategies.step import Step, Turns, clip_by_norm, sum_of_squares


class PipelineStep(Step):
    """A step whose gradients are spread over all stages.

    Args:
        rows: the number of rows of this replica, an int32 scalar.
        strategy: the pipeline's strategy.
        engine: this rank's engine, which knows the variables that stages share.
    """

    def __init__(
        self,
        rows: tf.Tensor,
        strategy: HybridStrategy,
        engine: Engine,
    ) -> None:
        super().__init__()
        self._rows = rows
        self._strategy = strategy
        self._engine = engine
        self.clips_together = strategy.pipeline_size > 1
        self._turns_of: defaultdict[Any, Turns] = defaultdict(Turns)

    def own_parts(self, values: Sequence[Any]) -> list[Any]:
        # A pipeline without rows computes with those of another.
        return zeros_without_rows(self._rows, values)

    def largest_over_replicas(self, values: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        replica, replicas = self._strategy.extended.place_here()
        local = self.own_parts(values)
        rows = [tf.one_hot(replica, replicas, dtype=v.dtype) for v in local]
        stacked = [tf.tensordot(row, v, 0) for row, v in zip(rows, local, strict=True)]
        return [tf.reduce_max(v, axis=0) for v in reduction.sum_over_replicas(stacked)]

    def before_update(self, variable: Any) -> list[tf.Tensor]:
        return self._turns_at(variable).before(variable)

    def updated(self, variable: Any) -> None:
        self._turns_at(variable).after(variable)

    def _turns_at(self, variable: Any) -> Turns:
        # The gradients of a stage become available all at once, those of a late update all do.
        late = self.late is not None
        return self._turns_of[None if late else self._engine.stage_of(variable)]

    def sums(self, variable: Any) -> bool:
        return self._engine.shared_variables.owns(variable)

    def sum_over_replicas(
        self,
        add_up: Callable[[Sequence[Any], Sequence[Any]], list[Any]],
        gradients: Sequence[Any],
        variables: Sequence[Any],
    ) -> list[Any]:
        return self._engine.shared_variables.sum_over_pipelines(add_up, gradients, variables)

    def squares(self, gradients: Sequence[Any], variables: Sequence[Any]) -> tf.Tensor:
        pairs = zip(gradients, variables, strict=True)
        own = sum_of_squares([g for g, v in pairs if self._engine.shared_variables.owns(v)])
        return self._strategy.pipeline_communicator.all_reduce([own])[0]

    def clip_by_global_norm(
        self, gradients: Sequence[Any], variables: Sequence[Any], norm: float
    ) -> list[Any]:
        found = tf.sqrt(self.squares(gradients, variables))
        return clip_by_norm(gradients, norm, found)


def zeros_without_rows(rows: tf.Tensor, values: Sequence[Any]) -> list[Any]:
    """The values; zeros on a replica without rows, where they may be NaN.

    Args:
        rows: the number of rows of this replica, an int32 scalar.
        values: dense tensors, `tf.IndexedSlices` or None.
    """
    results = list(values)
    if tf.get_static_value(rows):
        return results
    dense = []
    for i, value in enumerate(results):
        if isinstance(value, tf.IndexedSlices):  # No rows, no slices.
            count = tf.where(rows > 0, tf.shape(value.indices)[0], 0)
            results[i] = tf.IndexedSlices(
                value.values[:count], value.indices[:count], value.dense_shape
            )
        elif value is not None:
            dense.append(i)
    if is_compiled_here():
        has = has_rows(rows)
        for i in dense:
            results[i] = tf.where(has, values[i], tf.zeros([], values[i].dtype))
        return results
    # One conditional for all; each value still depends only on itself.
    chosen = tf.cond(
        rows > 0,
        lambda: [values[i] for i in dense],
        lambda: [tf.zeros_like(values[i]) for i in dense],
    )
    for i, value in zip(dense, chosen, strict=True):
        results[i] = value
    return results
