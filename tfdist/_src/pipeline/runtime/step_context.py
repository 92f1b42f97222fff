"""The step context of a pipeline rank."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdist._src.pipeline.placement.strategy import HybridStrategy
from tfdist._src.pipeline.runtime.engine import Engine
from tfdist._src.strategy import reduction
from tfdist._src.strategy.step import Step, Turns, clip_by_norm, sum_of_squares
from tfdist._src.xla import has_rows, or_zeros


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
        results = list(values)
        if tf.get_static_value(self._rows):
            return results
        # A pipeline without rows computes with those of another.
        has = has_rows(self._rows)
        dense = []
        for i, value in enumerate(results):
            if isinstance(value, tf.IndexedSlices):
                count = tf.where(has, tf.shape(value.indices)[0], 0)
                results[i] = tf.IndexedSlices(
                    value.values[:count], value.indices[:count], value.dense_shape
                )
            elif value is not None:
                dense.append(i)
        for i, value in zip(dense, or_zeros(has, [values[i] for i in dense]), strict=True):
            results[i] = value
        return results

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
