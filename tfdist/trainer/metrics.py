"""Metrics that take up one number for a batch, as one process would."""

from __future__ import annotations

import functools
from typing import Any

import keras

from tfdist.strategies.step import current_step
from tfdist.trainer.patching import patch


def install() -> None:
    """Replaces how Keras's means take up a number without a weight, in a tfdist step."""
    update = keras.metrics.Mean.update_state

    @functools.wraps(update)
    def update_by_rows(self: Any, values: Any, sample_weight: Any = None) -> Any:
        # Replicas and microbatches have a number each for their rows, which are a part of one.
        step = current_step()
        if step is not None and sample_weight is None and keras.ops.ndim(values) == 0:
            sample_weight = step.share
        return update(self, values, sample_weight=sample_weight)

    patch("Mean.update_state", lambda _: update_by_rows)
