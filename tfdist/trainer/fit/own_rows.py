"""How many rows of a batch this worker has."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdist.trainer.fit.replica_step import count_rows


def count_own_rows(strategy: tf.distribute.Strategy, batch: Any) -> tf.Tensor:
    """The rows of all local replicas, by the first component that has any; an int32 scalar.

    Args:
        strategy: the strategy that has distributed the batch.
        batch: a nest of tensors or of the local replicas' tensors; with a single replica, anything
            that a custom step accepts, which may have no rows.
    """
    for component in tf.nest.flatten(batch):
        parts = [v for v in strategy.experimental_local_results(component) if _has_rows(v)]
        if parts:
            return tf.add_n([count_rows(part) for part in parts])
    return tf.constant(0)


def _has_rows(component: Any) -> bool:
    # False also for a tensor of unknown rank, which may be a scalar.
    return bool(tf.TensorShape(getattr(component, "shape", ())).rank)
