"""The context in which a pipeline rank runs a step, and the optimizer's update in the step."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdist._src.internals.optimizer import batches_of, inner_optimizer, scales_losses
from tfdist._src.keras.optimizers.gradient_sync import LateUpdate, not_finite_anywhere, with_nan
from tfdist._src.pipeline.placement.strategy import HybridStrategy
from tfdist._src.pipeline.runtime.engine import Engine
from tfdist._src.sharding import is_sharded
from tfdist._src.strategy.extended import extended_of
from tfdist._src.strategy.step import Step, UpdateOrder, clip_by_norm, sum_of_squares
from tfdist._src.xla import has_rows, or_zeros


def loss_scale(optimizer: Any, strategy: HybridStrategy, engine: Engine) -> tf.Tensor:
    """Returns the loss scale of this step as a float32 scalar.

    All ranks of a pipeline must call this function together, and they get the same value.

    Args:
        optimizer: this rank's optimizer.
        strategy: the pipeline's strategy.
        engine: this rank's engine.
    """
    scale = tf.cast(optimizer.scale_loss(tf.constant(1.0)), tf.float32)
    trains = engine.training_ranks
    if scales_losses(optimizer) and 0 < len(trains) < strategy.pipeline_size:
        # Only the ranks with trainable variables apply their optimizers, which update the loss
        # scale. The other ranks would use outdated loss scales.
        communicator: Any = strategy.pipeline_communicator
        scale = communicator.broadcast(scale, trains[-1])
    return scale


def participate_without_update(optimizer: Any, step: Step, overflowed: tf.Tensor) -> None:
    """Takes part in the update on a rank that has no trainable variables.

    The rank counts the step, and joins the collectives with which the other ranks clip their
    gradients by the global norm.

    Args:
        optimizer: the optimizer of this rank, which has no gradients to apply.
        step: this rank's step.
        overflowed: whether gradients overflowed, so that the optimizers of the other ranks skip
            the step.
    """
    inner = inner_optimizer(optimizer)

    def clip() -> None:
        step.clip_by_global_norm([], [], inner.global_clipnorm)

    def count() -> None:
        batches = batches_of(inner)
        if inner.global_clipnorm:
            due = tf.equal((batches + 1) % (inner.gradient_accumulation_steps or 1), 0)
            tf.cond(due, clip, lambda: None)
        batches.assign_add(1)

    tf.cond(overflowed, lambda: None, count)


class PipelineStep(Step):
    """A step in a pipeline, where each rank has only the gradients of its own stages.

    Args:
        rows: the number of rows of this replica, an int32 scalar.
        strategy: the pipeline's strategy.
        engine: this rank's engine.
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
        self._turns_of: defaultdict[Any, UpdateOrder] = defaultdict(UpdateOrder)

    def own_parts(self, values: Sequence[Any]) -> list[Any]:
        results = list(values)
        if tf.get_static_value(self._rows):
            return results
        # A pipeline without rows computes with a row of another pipeline. The gradients of this row
        # must not be added to the sum, so they are replaced with zeros or empty slices.
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
        extended = extended_of(self._strategy)
        replica, replicas = extended.place_here()
        local = self.own_parts(values)
        rows = [tf.one_hot(replica, replicas, dtype=v.dtype) for v in local]
        stacked = [tf.tensordot(row, v, 0) for row, v in zip(rows, local, strict=True)]
        return [tf.reduce_max(v, axis=0) for v in extended.sum_over_replicas(stacked)]

    def before_update(self, variable: Any) -> list[tf.Tensor]:
        return self._turns_at(variable).before(variable)

    def updated(self, variable: Any) -> None:
        self._turns_at(variable).after(variable)

    def _turns_at(self, variable: Any) -> UpdateOrder:
        # The gradients of all variables of a stage become available together, so each stage has its
        # own order of updates. If the update is deferred, the gradients of all stages are already
        # available, so all stages share one order.
        late = self.late is not None
        return self._turns_of[None if late else self._engine.stage_of(variable)]

    def sums(self, variable: Any) -> bool:
        return self._engine.shared_variables.owns(variable)

    def sum_gradients_of_part(
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


def prepare_update(model: Any, strategy: HybridStrategy, engine: Engine, step: Step) -> LateUpdate:
    """Performs the communication that must precede the optimizer's update.

    Args:
        model: the PipelineModel.
        strategy: the model's strategy.
        engine: this rank's engine. Its `sums` must contain the gradients of all microbatches.
        step: the step.

    Returns:
        The remaining part of the update, which can be deferred to the end of the step.
    """
    optimizer = model.optimizer
    variables = model.trainable_variables
    gradients = [engine.sums.of(v) for v in variables]
    gradients = engine.shared_variables.sum_gradients(variables, gradients)
    overflowed = tf.constant(False)
    if scales_losses(optimizer):

        def add_up(value: tf.Tensor) -> Any:
            total = strategy.pipeline_communicator.all_reduce([value])[0]
            return extended_of(strategy).sum_over_replicas(total)

        gradients = step.own_parts(gradients)
        overflowed = not_finite_anywhere(gradients, add_up)
        gradients = with_nan(gradients, overflowed)
        step.agreed_on_overflow = True
    pairs = [(g, v) for g, v in zip(gradients, variables, strict=True) if g is not None]
    changes = engine.shared_variables.sum_state_changes()

    def apply() -> None:
        if pairs:
            optimizer.apply_gradients(pairs)
        else:
            participate_without_update(optimizer, step, overflowed)
        if is_sharded(optimizer):
            engine.shared_variables.broadcast_from_owners()

    return LateUpdate(
        apply,
        optimizer,
        gradients=(),  # The update need not wait for them, since the step has already done so.
        operations=len(tf.compat.v1.get_default_graph().get_operations()),
        communicated=list(changes),
    )
