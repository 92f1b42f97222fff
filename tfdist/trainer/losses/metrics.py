"""Metrics with the results of a single process: scalar updates, and state created anywhere."""

from __future__ import annotations

import functools
from typing import Any

import keras

from tfdist.internals.keras import metrics_of
from tfdist.internals.tensorflow import DistributedValues
from tfdist.internals.variables import replace_value
from tfdist.strategies.step import replicated_step
from tfdist.strategies.warn_once import warn_once
from tfdist.trainer.patching import patch


def install() -> None:
    """Replaces how Keras's metrics handle a scalar without a weight in a tfdist step."""
    patch("Mean.update_state", _by_rows)
    patch("Sum.update_state", _by_rows)


def _by_rows(update: Any) -> Any:
    @functools.wraps(update)
    def update_by_rows(self: Any, values: Any, sample_weight: Any = None) -> Any:
        # Each replica and microbatch has a scalar for its rows, which are part of one batch.
        step = replicated_step()
        if step is not None and sample_weight is None and keras.ops.ndim(values) == 0:
            if isinstance(self, keras.metrics.Sum):
                warn_once(
                    f"The metric {self.name!r} (keras.metrics.Sum) is updated with a scalar per "
                    "batch. Each of several replicas passes a scalar, which is treated as a mean "
                    "over its rows: the metric sums their mean, weighted by rows. If the scalar is "
                    "itself a sum over rows, pass a value for each row, or the scalar with "
                    "sample_weight=1."
                )
            sample_weight = step.share
        return update(self, values, sample_weight=sample_weight)

    return update_by_rows


def take_over_metrics(model: keras.Model) -> None:
    """Replicates the state of metrics that were created outside the scope.

    Collective over all workers.

    Args:
        model: a model under a tfdist strategy.
    """
    strategy = model.distribute_strategy
    if not strategy.extended.communicates:
        return
    for variable in {id(v): v for m in metrics_of(model) for v in m.variables}.values():
        if not isinstance(variable.value, DistributedValues):
            with strategy.scope():
                replace_value(variable)
