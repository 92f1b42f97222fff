"""The state of a training passed from one worker to others of the group."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfdist.elastic.held_state import held_by
from tfdist.trainer.fit.metric_state import MetricTotals

Broadcast = Callable[[tf.Tensor, int], tf.Tensor]


def share_state(
    model: keras.Model, totals: MetricTotals, broadcast: Broadcast, source: int, *, takes: bool
) -> None:
    """Passes weights, the optimizer's state and the metrics' totals on; called by all workers.

    What differs between workers, such as shards of the optimizer's state, is left out.

    Args:
        model: in training.
        totals: those of its metrics.
        broadcast: returns the value of a rank on all workers.
        source: that rank.
        takes: whether this worker takes the values.
    """
    for held in held_by(model):
        if held.is_common:
            _share(held.read(), held.assign, broadcast, source, takes)
    for total in totals.variables():
        _share(total.read_value(), total.assign, broadcast, source, takes)


def _share(
    value: tf.Tensor,
    assign: Callable[[Any], object],
    broadcast: Broadcast,
    source: int,
    takes: bool,
) -> None:
    given = broadcast(value, source)
    if takes:
        assign(given)
