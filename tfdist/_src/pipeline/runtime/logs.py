"""Computes the logs, the list of transfers and the timeline of a pipeline's step."""

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfdist._src.global_view.transfer import SPARSE_GRADIENT, Transfer
from tfdist._src.keras.fit.metric_state import metric_variables
from tfdist._src.pipeline.partition.cut import Edge, Partition
from tfdist._src.pipeline.partition.graph import Key
from tfdist._src.pipeline.placement.strategy import HybridStrategy, pipeline_extended_of
from tfdist._src.pipeline.runtime.microbatch_executor import Outcome
from tfdist._src.pipeline.simulation import Span, Timeline
from tfdist._src.pipeline.stages.value_specs import ValueSpec, ValueSpecs
from tfdist._src.strategy.extended import extended_of


def between_stages(
    partition: Partition,
    value_specs: ValueSpecs,
    strategy: HybridStrategy,
    backward: Collection[Key],
    rows: int,
) -> Iterator[Transfer]:
    """Yields the transfers between stages on different workers in a training step.

    Each transfer covers all microbatches of a batch.

    Args:
        partition: the model's partition into stages.
        value_specs: the specs of the values that pass between stages.
        strategy: the strategy, which assigns the stages to ranks.
        backward: the keys of the values for which gradients are sent back.
        rows: the number of rows of the batch.
    """
    names = _names(partition)

    def sent(edge: Edge, key: Key, what: str, spec: ValueSpec) -> Transfer:
        shape = tuple(size + per_row * rows for size, per_row in spec.shape)
        where = f"{names[key]} (stage {edge.source} to {edge.target})"
        return _transfer("send", what, shape, spec.dtype, where)

    for edge in partition.edges:
        if strategy.pipeline_rank_of(edge.source) == strategy.pipeline_rank_of(edge.target):
            continue
        for key in edge.keys:
            yield sent(edge, key, "activation", value_specs.of(key))
            if key in backward:
                yield sent(edge, key, "gradient", value_specs.of(key))
        for key in edge.masked:
            yield sent(edge, key, "mask", value_specs.mask_of(key))


def gradients(
    partition: Partition, strategy: HybridStrategy, sparse: Collection[str]
) -> Iterator[Transfer]:
    """Yields the transfers of the gradients that workers sum in a training step.

    Workers sum the gradients of a variable that several stages of a pipeline share. If there are
    several pipelines, workers also sum the gradients of all variables over the pipelines.

    Args:
        partition: the model's partition into stages.
        strategy: the strategy.
        sparse: the paths of the variables with sparse gradients.
    """
    for shared in partition.shared:
        ranks = {strategy.pipeline_rank_of(stage) for stage in shared.stages}
        if shared.variable.trainable and len(ranks) > 1:
            stages = " and ".join(map(str, shared.stages))
            yield _gradient(shared.variable, f"shared by stages {stages}", sparse)
    if pipeline_extended_of(strategy).mesh.pipeline_count == 1:
        return
    seen: set[int] = set()
    for stage in partition.stages:
        for variable in stage.trainable_variables:
            if id(variable) not in seen:
                seen.add(id(variable))
                yield _gradient(variable, f"stage {stage.index} of all pipelines", sparse)


def _gradient(variable: Any, whose: str, sparse: Collection[str]) -> Transfer:
    dtype, where = tf.as_dtype(variable.dtype), f"{variable.path} ({whose})"
    shape = tuple(variable.shape)
    if variable.path in sparse:  # The gradient has one row for each lookup in the batch.
        shape = (None, *shape[1:])
        return _transfer("gather", "gradient", shape, dtype, where, SPARSE_GRADIENT)
    return _transfer("reduce", "gradient", shape, dtype, where)


def _transfer(
    kind: str,
    what: str,
    shape: Sequence[int | None],
    dtype: tf.DType,
    where: str,
    reason: str = "",
) -> Transfer:
    count: int | None = dtype.size
    for size in shape:
        count = None if count is None or size is None else count * size
    return Transfer(kind, what, count, tuple(shape), where, reason, dtype.size)


def _names(partition: Partition) -> dict[Key, str]:
    """Returns the name of the layer call or model input that produces each value, by key."""
    graph = partition.graph
    names = {key: t.name for key, t in zip(graph.inputs, graph.model.inputs, strict=True)}
    for stage in partition.stages:
        for call in stage.calls:
            names.update(dict.fromkeys(call.outputs, call.name))
    return names


class Recorded(NamedTuple):
    """The times recorded in a step on a rank.

    Attributes:
        microbatches: the number of microbatches.
        times: a float64 array of shape `[actions, 2]` with the start and end of each of the rank's
            actions, in seconds of Unix time.
    """

    microbatches: int
    times: np.ndarray


def actions_of(strategy: HybridStrategy, recorded: Recorded) -> list[tuple[str, float, float]]:
    """Returns this rank's actions as tuples `(name, start, end)`, in seconds of Unix time."""
    actions = strategy.schedule_for(recorded.microbatches).actions[strategy.pipeline_rank]
    spans = recorded.times.tolist()
    return [(str(action), *span) for action, span in zip(actions, spans, strict=False)]


def gather_timeline(strategy: HybridStrategy, recorded: Recorded) -> Timeline:
    """Gathers the timeline of this rank's pipeline; all ranks of the job must call it together.

    The result is correct only if the clocks of the ranks are synchronized.

    Args:
        strategy: the pipeline's strategy.
        recorded: the times recorded on this rank.
    """
    extended = pipeline_extended_of(strategy)
    group, mesh = extended.group, extended.mesh
    texts = group.exchange("timeline", json.dumps(recorded.times.tolist()))
    own = [json.loads(texts[rank]) for rank in mesh.pipeline_of(group.topology.rank)]
    schedule = strategy.schedule_for(recorded.microbatches)
    begin = min(start for times in own for start, _ in times)
    return Timeline(
        schedule.name,
        tuple(
            tuple(
                Span(action, start - begin, end - begin)
                for action, (start, end) in zip(actions, times, strict=True)
            )
            for actions, times in zip(schedule.actions, own, strict=True)
        ),
    )


@dataclass(frozen=True)
class LayerResult:
    """Describes a result of a metric that belongs to a layer.

    Attributes:
        rank: the first pipeline rank that holds the layer.
        shape: the shape of the result.
    """

    rank: int
    shape: tuple[int, ...]


def collect_layer_results(partition: Partition, strategy: HybridStrategy) -> dict[str, LayerResult]:
    """Describes the results of the metrics of all layers; all ranks of the job call it together.

    Returns:
        The ranks and shapes of the results, by their names in the logs.
    """
    mine = [partition.stages[index] for index in strategy.stages_of(strategy.pipeline_rank)]
    shapes: dict[str, list[int]] = {}
    for layer in (layer for stage in mine for layer in stage.layers):
        for metric in layer.metrics:
            result = metric.result()
            results = result if isinstance(result, dict) else {metric.name: result}
            shapes |= {name: list(value.shape) for name, value in results.items()}
    extended = pipeline_extended_of(strategy)
    group, mesh = extended.group, extended.mesh
    answers = group.exchange("metrics of layers", json.dumps(shapes))
    found: dict[str, LayerResult] = {}
    for pipeline_rank, rank in enumerate(mesh.pipeline_of(0)):
        for name, shape in json.loads(answers[rank]).items():
            found.setdefault(name, LayerResult(pipeline_rank, tuple(shape)))
    return found


def mean_loss(
    strategy: HybridStrategy, outcome: Outcome, rows: tf.Tensor, total: tf.Tensor
) -> tf.Tensor:
    """Returns the loss of this replica, on all ranks of its pipeline.

    The losses of the replicas are scaled so that their mean, weighted by the replicas' numbers of
    rows, is the loss of the batch.

    Args:
        strategy: the pipeline's strategy.
        outcome: the results of the step on this rank.
        rows: the number of rows of this replica.
        total: the number of rows of the batch.
    """
    weight = tf.math.divide_no_nan(tf.cast(total, tf.float32), tf.cast(rows, tf.float32))
    loss = tf.where(rows > 0, tf.add_n([tf.zeros([]), *outcome.losses]) * weight, 0.0)
    # The sum starts after all actions. Otherwise, a rank that computes no losses would start the
    # sum at the beginning of the step, and would seem to wait for the other ranks all the time.
    with tf.control_dependencies(outcome.last):
        sum_: tf.Tensor = strategy.pipeline_communicator.all_reduce([loss])[0]
    return sum_


def sum_over_pipelines(
    model: keras.Model, statistics: Sequence[Any], rows: tf.Tensor, total: tf.Tensor
) -> tuple[dict[str, Any], list[tf.Tensor]]:
    """Combines the metrics and the moving statistics of all pipelines.

    The variables of metrics are combined according to their `aggregation`, which is usually a sum.
    Moving statistics, such as the moving mean of a batch normalization, are replaced with their
    mean over the pipelines. In this mean, each pipeline is weighted by its number of rows.

    Args:
        model: the model with the metrics.
        statistics: the moving statistics that this pipeline has updated from its own rows.
        rows: the number of rows of this pipeline.
        total: the number of rows of the batch.

    Returns:
        The results of the metrics for all pipelines, and the combined values of
        `metric_variables(model)`.
    """
    extended = extended_of(model.distribute_strategy)
    share = tf.math.divide_no_nan(tf.cast(rows, tf.float32), tf.cast(total, tf.float32))
    is_first = tf.equal(extended.place_here()[0], 0)

    def part(variable: Any, aggregation: tf.VariableAggregation) -> tf.Tensor:
        value = tf.convert_to_tensor(variable)
        if aggregation == tf.VariableAggregation.SUM:
            return value
        is_mean = aggregation != tf.VariableAggregation.ONLY_FIRST_REPLICA
        if is_mean and (value.dtype.is_floating or value.dtype.is_complex):
            return tf.where(rows > 0, value * tf.cast(share, value.dtype), tf.zeros_like(value))
        return tf.where(is_first, value, tf.zeros_like(value))

    metrics = metric_variables(model)
    parts = [part(v, v.value.aggregation) for v in metrics]
    parts += [part(v, tf.VariableAggregation.MEAN) for v in statistics]
    sums = extended.sum_over_replicas(parts, "metrics")
    totals, means = sums[: len(metrics)], sums[len(metrics) :]
    for variable, mean in zip(statistics, means, strict=True):
        variable.assign(mean)
    with keras.StatelessScope(list(zip(metrics, totals, strict=True))):
        results = tf.nest.map_structure(tf.convert_to_tensor, model.get_metrics_result())
    return results, totals


def share_logs(
    strategy: HybridStrategy,
    results: Mapping[str, Any],
    layer_results: Mapping[str, LayerResult],
) -> dict[str, Any]:
    """Shares the results of metrics among the ranks of a pipeline.

    The results of a layer's metrics are sent by the rank that holds the layer. All other results
    are sent by the rank that holds the last stage.

    Args:
        strategy: the pipeline's strategy.
        results: the results on this rank, by name.
        layer_results: the results of `collect_layer_results`.
    """
    pipeline_rank = strategy.pipeline_rank
    holds_last = strategy.pipeline_rank_of(strategy.stages - 1) == pipeline_rank
    # The result of a metric may be a nested structure of tensors, of any shapes.
    model_results = {name: result for name, result in results.items() if name not in layer_results}
    values = [
        tf.cast(value, tf.float64) if holds_last else tf.zeros(value.shape, tf.float64)
        for value in keras.tree.flatten(model_results)
    ]
    layer_values = [
        tf.cast(results[name], tf.float64)
        if it.rank == pipeline_rank
        else tf.zeros(it.shape, tf.float64)
        for name, it in layer_results.items()
    ]
    sums = strategy.pipeline_communicator.all_reduce([*values, *layer_values])
    totals = [tf.cast(total, tf.float32) for total in sums]
    logs: dict[str, Any] = keras.tree.pack_sequence_as(model_results, totals[: len(values)])
    return {**logs, **dict(zip(layer_results, totals[len(values) :], strict=True))}
