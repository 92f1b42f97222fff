"""Metrics as one process would see them: numbers for a batch, and state made anywhere."""

from __future__ import annotations

import functools
from typing import Any

import keras

from tfdist.internals.keras import metrics_of
from tfdist.internals.tensorflow import DistributedValues
from tfdist.internals.variables import replace_value
from tfdist.strategies.step import current_step
from tfdist.strategies.warn_once import warn_once
from tfdist.trainer.patching import patch


def install() -> None:
    """Replaces how Keras's metrics take up a number without a weight, in a tfdist step."""
    patch("Mean.update_state", _by_rows)
    patch("Sum.update_state", _by_rows)


def _by_rows(update: Any) -> Any:
    @functools.wraps(update)
    def update_by_rows(self: Any, values: Any, sample_weight: Any = None) -> Any:
        # Replicas and microbatches have a number each for their rows, which are a part of one.
        step = current_step()
        if step is not None and sample_weight is None and keras.ops.ndim(values) == 0:
            if isinstance(self, keras.metrics.Sum):
                warn_once(
                    f"The metric {self.name!r} (keras.metrics.Sum) gets one number for a batch. "
                    "With several replicas each gives its number, which is taken as a mean over "
                    "its rows: the metric adds up their mean, weighted by rows. If the number is "
                    "itself a sum over rows, give the metric a value for each row, or the number "
                    "with sample_weight=1."
                )
            sample_weight = step.share
        return update(self, values, sample_weight=sample_weight)

    return update_by_rows


def take_over_metrics(model: keras.Model) -> None:
    """Gives metrics that were made outside of the scope a copy of their state on each replica.

    Args:
        model: of a strategy; all workers call this.
    """
    strategy = model.distribute_strategy
    if strategy.num_replicas_in_sync == 1:
        return
    for variable in {id(v): v for m in metrics_of(model) for v in m.variables}.values():
        if not isinstance(variable.value, DistributedValues):
            with strategy.scope():
                replace_value(variable)
