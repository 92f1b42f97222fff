"""The step context of a pipeline rank."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdist.pipeline.placement.strategy import HybridStrategy
from tfdist.pipeline.runtime.engine import Engine
from tfdist.strategies.step import Step, Turns, clip_by_norm, sum_of_squares


class PipelineStep(Step):
    """A step whose gradients are spread over all stages.

    Args:
        rows: as for `Step`.
        total: as for `Step`.
        first_row: as for `Step`.
        strategy: the pipeline's strategy.
        engine: this rank's engine, which knows the variables that stages share.
    """

    def __init__(
        self,
        rows: tf.Tensor,
        total: tf.Tensor,
        first_row: tf.Tensor,
        strategy: HybridStrategy,
        engine: Engine,
    ) -> None:
        super().__init__(rows, total, first_row)
        self.scaled_by_rows = True  # Each microbatch has computed its contributions to sums.
        self._strategy = strategy
        self._engine = engine
        self.clips_together = strategy.pipeline_size > 1
        self._turns_of: defaultdict[Any, Turns] = defaultdict(Turns)

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
