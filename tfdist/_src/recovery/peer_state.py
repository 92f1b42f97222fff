"""The state of a training passed from one worker to others of the group."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist._src.keras.fit.metric_state import MetricTotals
from tfdist._src.snapshots.held_state import held_by
from tfdist.errors import ProgramMismatchError

Broadcast = Callable[[tf.Tensor, int], tf.Tensor]
_MOST_KEPT_BYTES = 1 << 30
"""The limit of host memory for copies. Values beyond it are not put back."""


class ReplacedValues:
    """Keeps the values that a transfer replaces, to be put back if it does not end."""

    def __init__(self) -> None:
        self._kept: list[tuple[Callable[[Any], object], tf.Tensor]] = []
        self._bytes = 0

    def keep(self, value: tf.Tensor, assign: Callable[[Any], object]) -> None:
        """Keeps the value of a variable that is about to be assigned."""
        self._bytes += value.dtype.size * value.shape.num_elements()
        if self._bytes > _MOST_KEPT_BYTES:
            self._kept = []
            return
        with tf.device("CPU:0"):
            self._kept.append((assign, tf.identity(value)))

    def put_back(self) -> bool:
        """Puts all values back; returns whether all had been kept."""
        for assign, value in self._kept:
            assign(value)
        return self._bytes <= _MOST_KEPT_BYTES


def share_state(
    model: keras.Model,
    totals: MetricTotals,
    workers: Any,
    source: int,
    *,
    takes: bool,
    replaced: ReplacedValues | None,
) -> None:
    """Passes weights, the optimizer's state and the metrics' totals on; called by all workers.

    What differs between workers, such as shards of the optimizer's state, is left out.

    Args:
        model: in training.
        totals: those of its metrics.
        workers: the communicator of the workers that hold the same part of the model.
        source: the rank that has the state.
        takes: whether this worker takes the values.
        replaced: keeps its own, if they are of use.

    Raises:
        ProgramMismatchError: a worker does not have a variable of the state; the same on all.
    """
    held = {one.key: (one.read, one.assign) for one in held_by(model) if one.is_common}
    kept = {key: (total.read_value, total.assign) for key, total in totals.by_place().items()}
    state = {**held, **kept}
    of_all = _gather_names(list(state), workers)
    if missing := sorted(key for keys in of_all for key in keys ^ of_all[0]):
        raise ProgramMismatchError(
            f"A worker that joins a running job must have all variables of its model when `fit` "
            f"begins. Received: a model without {missing[0]!r}. Create all layers, optimizers and "
            "metrics in the strategy's scope, and build them before `fit`."
        )
    for read, assign in state.values():
        _share(read(), assign, workers.broadcast, source, takes, replaced)


def _gather_names(names: Sequence[str], workers: Any) -> list[set[str]]:
    line = f"{json.dumps(names)}\n".encode()
    lines = workers.all_gather(tf.constant(np.frombuffer(line, np.uint8))).numpy().tobytes()
    return [set(json.loads(line)) for line in lines.splitlines()]


def _share(
    value: tf.Tensor,
    assign: Callable[[Any], object],
    broadcast: Broadcast,
    source: int,
    takes: bool,
    replaced: ReplacedValues | None,
) -> None:
    given = broadcast(value, source)
    if takes:
        if replaced is not None:
            replaced.keep(value, assign)
        assign(given)
