"""The state of a training passed from one worker to others of the group."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfdist.elastic.held_state import held_by
from tfdist.errors import UnsupportedError
from tfdist.trainer.fit.metric_totals import MetricTotals

Broadcast = Callable[[tf.Tensor, int], tf.Tensor]


def share_state(
    model: keras.Model, totals: MetricTotals, broadcast: Broadcast, source: int, *, takes: bool
) -> None:
    """Passes weights, the optimizer's state and the metrics' totals on; called by all workers.

    Args:
        model: in training.
        totals: those of its metrics.
        broadcast: returns the value of a rank on all workers.
        source: that rank.
        takes: whether this worker takes the values.

    Raises:
        UnsupportedError: the state is divided among the workers.
    """
    for held in held_by(model):
        if held.start is not None:
            raise UnsupportedError(
                "The state of a sharded optimizer cannot be passed on to other workers. Received: "
                f"{held.key!r}, a shard. Train without `shard_optimizer=True`, or restart the job."
            )
        if not held.is_own:
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
