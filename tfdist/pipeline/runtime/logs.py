"""The logs of a step, equal on all ranks, though each rank has metrics of its own layers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from tfdist.pipeline.partition.cut import Partition
from tfdist.pipeline.placement.strategy import HybridStrategy


@dataclass(frozen=True)
class LayerResult:
    """A result of a metric that a layer has.

    Attributes:
        place: in the pipeline, of the rank that has it.
        shape: its shape.
    """

    place: int
    shape: tuple[int, ...]


def results_of_layers(partition: Partition, strategy: HybridStrategy) -> dict[str, LayerResult]:
    """The results of all layers' metrics by name; all ranks of the job call it together."""
    mine = [partition.stages[index] for index in strategy.stages_of(strategy.place)]
    shapes: dict[str, list[int]] = {}
    for layer in (layer for stage in mine for layer in stage.layers):
        for metric in layer.metrics:
            result = metric.result()
            results = result if isinstance(result, dict) else {metric.name: result}
            shapes |= {name: list(value.shape) for name, value in results.items()}
    group, mesh = strategy.extended.group, strategy.extended.mesh
    answers = group.exchange("metrics of layers", json.dumps(shapes))
    found: dict[str, LayerResult] = {}
    for place, rank in enumerate(mesh.pipeline_of(0)):
        for name, shape in json.loads(answers[rank]).items():
            found.setdefault(name, LayerResult(place, tuple(shape)))
    return found


def share_logs(
    strategy: HybridStrategy,
    results: Mapping[str, Any],
    of_layers: Mapping[str, LayerResult],
) -> dict[str, Any]:
    """The results on all ranks of a pipeline: of layers from theirs, the others from the last.

    Args:
        strategy: the pipeline's.
        results: this rank's.
        of_layers: as `results_of_layers` gives them.
    """
    here = strategy.place
    holds_last = strategy.rank_of(strategy.stages - 1) == here
    # A metric may have several results, or one of any shape.
    of_model = {name: result for name, result in results.items() if name not in of_layers}
    values = [
        tf.cast(value, tf.float64) if holds_last else tf.zeros(value.shape, tf.float64)
        for value in keras.tree.flatten(of_model)
    ]
    values_of_layers = [
        tf.cast(results[name], tf.float64) if it.place == here else tf.zeros(it.shape, tf.float64)
        for name, it in of_layers.items()
    ]
    sums = strategy.pipeline_communicator.all_reduce([*values, *values_of_layers])
    totals = [tf.cast(total, tf.float32) for total in sums]
    logs: dict[str, Any] = keras.tree.pack_sequence_as(of_model, totals[: len(values)])
    return {**logs, **dict(zip(of_layers, totals[len(values) :], strict=True))}
