"""The variable that every replica holds a copy of, kept equal without merging replica threads."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdist.internals.tensorflow import MirroredVariable, SyncOnReadVariable
from tfdist.strategies.step import current_step


class ReplicatedVariable(MirroredVariable):  # type: ignore[misc]
    """A mirrored variable that can be assigned inside `tf.cond`, and tells the step of it.

    Assigned by a replica, a variable without aggregation changes on that replica alone, as in
    TensorFlow; the step in progress averages such variables when it ends. One that takes the
    first replica's value takes the replica's own: replicas run the same program.
    """

    def _update_replica(self, update_fn: Any, value: Any, **kwargs: Any) -> Any:
        step = current_step()
        if step is not None:
            step.written[id(self)] = self
        local = self._get_on_device_or_primary()
        if self.aggregation in (
            tf.VariableAggregation.NONE,
            tf.VariableAggregation.ONLY_FIRST_REPLICA,
        ):
            return update_fn(local, value, **kwargs)
        if self.aggregation == tf.VariableAggregation.MEAN and step is not None:
            value = step.weigh(tf.convert_to_tensor(value, local.dtype))
            mean = tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, value)
            return update_fn(local, mean, **kwargs)
        return super()._update_replica(update_fn, value, **kwargs)


VARIABLE_CLASSES = {
    tf.VariableSynchronization.ON_WRITE: ReplicatedVariable,
    tf.VariableSynchronization.ON_READ: SyncOnReadVariable,
}
