"""Layers that mix the rows of a batch, applied to the rows of the global batch."""

from __future__ import annotations

import functools
from typing import Any

import tensorflow as tf

from tfdist.internals.contract import TARGETS
from tfdist.strategies.step import WholeBatch, replicated_step
from tfdist.trainer import global_batch
from tfdist.trainer.patching import patch


def install() -> None:
    """Replaces how Keras's MixUp and CutMix are called inside a tfdist step."""
    for name in ("MixUp.call", "CutMix.call"):
        if name in TARGETS:
            patch(name, _over_all_rows)


def _over_all_rows(call: Any) -> Any:
    @functools.wraps(call)
    def mix(self: Any, data: Any, training: bool = True) -> Any:
        step = replicated_step()
        if step is None or isinstance(step, WholeBatch) or not training:
            return call(self, data, training=training)
        data = tf.nest.map_structure(_constant, global_batch.rows(data))
        with WholeBatch(step.total):
            mixed = call(self, data, training=training)
        # A replica without rows takes the last row, which is not counted.
        first = tf.minimum(step.first_row, step.total - 1)
        own = slice(first, tf.maximum(step.first_row + step.rows, first + 1))
        return tf.nest.map_structure(lambda rows: rows[own], mixed)

    return mix


def _constant(rows: tf.Tensor) -> tf.Tensor:
    return tf.raw_ops.PreventGradient(
        input=rows,
        message="With several replicas MixUp and CutMix use rows of other replicas, through which "
        "no gradient flows: apply them to the inputs of a model, before all trainable layers.",
    )
