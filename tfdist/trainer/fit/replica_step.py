"""One replica's training or test step, and the synchronization of the replicas at its end.

A step ends with a single all-reduce of all small values: the metrics' state, the moving statistics
that the step has changed, and the values that a custom step returned.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfdist.collective.overlap import overlapping
from tfdist.internals.keras import Model, is_seed_state
from tfdist.strategies import reduction
from tfdist.strategies.step import Step
from tfdist.strategies.variables import SummedVariable
from tfdist.trainer.fit.empty_replicas import with_a_row
from tfdist.trainer.fit.step_requests import requests
from tfdist.trainer.optimizers.late_update import Trial, update_late


def run_replica_step(
    model: keras.Model,
    step_function: Callable[[Any], Any],
    batch: Any,
    *,
    late: Trial | None = None,
) -> tuple[Any, Any, Any]:
    """Runs `train_step` or `test_step` on a replica's part of a batch.

    Args:
        model: the model.
        step_function: `model.train_step` or `model.test_step`.
        batch: the replica's rows.
        late: given if an update may be put off to the end of the step.

    Returns:
        The logs of the step, equal on all replicas (metrics over all rows so far, other values
        averaged over the rows of the step), the totals of `metric_variables(model)`, and the number
        of rows of the global batch and of requests, which a replica that has no others
        does not count (0).
    """
    context = tf.distribute.get_replica_context()
    if not context.strategy.extended.communicates:
        return step_function(batch), [], tf.constant([0, 0])
    with begin_step(context, batch) as step:
        if late is not None and not tf.executing_eagerly():
            step.late_in = tf.compat.v1.get_default_graph()
        before = metric_values(model)
        logs = step_function(with_a_row(batch, step.rows))
        forget_without_rows(model, step, before)
        synchronized = sync_step_state(context, model, step, logs)
        update_late(step, late)
        return *synchronized, tf.stack([step.total, step.requests])


def metric_variables(model: keras.Model) -> list[Any]:
    """The metric variables of a model that each replica updates separately, without duplicates."""
    variables = {id(v): v for m in model.metrics for v in m.variables}.values()
    return [v for v in variables if isinstance(v.value, SummedVariable)]


def metric_values(model: keras.Model) -> dict[int, tf.Tensor]:
    """The values of `metric_variables(model)`, by the variable's id."""
    return {id(v): tf.convert_to_tensor(v) for v in metric_variables(model)}


def begin_step(context: Any, batch: Any) -> Step:
    """Counts the rows of all replicas, which hold the batch's rows in order."""
    rows = count_rows(batch)
    replica, replicas = context.strategy.extended.place_here()
    own = tf.one_hot(replica, replicas, on_value=rows, off_value=0, dtype=tf.int32)
    own = tf.concat([own, [requests.in_graph()]], axis=0)
    with overlapping():  # the forward pass needs no number of rows
        sums = reduction.sum_over_replicas(own, "rows")
    ends = tf.cumsum(sums[:replicas])
    step = Step(rows, ends[-1], ends[replica] - rows, requests=sums[replicas])
    step.some_are_empty = tf.reduce_any(tf.equal(sums[:replicas], 0))
    return step


def count_rows(batch: Any) -> tf.Tensor:
    """The number of rows of a batch: the first dimension of its first component."""
    for component in tf.nest.flatten(batch):
        if component is None or isinstance(component, tf.experimental.Optional):
            continue
        if isinstance(component, tf.RaggedTensor):
            return tf.cast(component.nrows(), tf.int32)
        if isinstance(component, tf.SparseTensor):
            return tf.cast(component.dense_shape[0], tf.int32)
        # Static if known, so that noise for rows can be told from other noise.
        known = component.shape[0]
        return tf.shape(component)[0] if known is None else tf.constant(known, tf.int32)
    raise ValueError("A batch must contain at least one tensor. Received: an empty structure.")


def forget_without_rows(model: keras.Model, step: Step, before: dict[int, tf.Tensor]) -> None:
    """Restores the metrics of a replica without rows, whose updates may be NaN.

    Args:
        model: the model with the metrics.
        step: the replica's step.
        before: `metric_values(model)` before the step.
    """
    for variable in metric_variables(model):
        # A metric that was built during the step starts from zero.
        value = before.get(id(variable))
        value = tf.zeros_like(variable) if value is None else value
        variable.assign(tf.where(step.share > 0, variable, value))


def sync_step_state(context: Any, model: keras.Model, step: Step, logs: Any) -> tuple[Any, Any]:
    """Synchronizes metrics, moving statistics and logs over all replicas.

    Args:
        context: the replica context.
        model: the model with the metrics.
        step: the replica's step, at its end.
        logs: the replica's logs.

    Returns:
        The logs and totals of `run_replica_step`.
    """
    metrics = metric_variables(model)
    statistics = _changed_statistics(step)
    values = [tf.convert_to_tensor(v) for v in tf.nest.flatten(logs)]
    averaged = [i for i, v in enumerate(values) if v.dtype.is_floating]
    others = _other_values(model, step, logs)

    # Before a late update, it is the backward pass that the step goes on with.
    with overlapping() if step.late is not None else contextlib.nullcontext():
        sums = reduction.sum_over_replicas(
            [_metric_contribution(context, step, v) for v in metrics]
            + [_contribution(context, step, tf.convert_to_tensor(v)) for v in statistics]
            + [step.scale_by_rows(values[i]) for i in averaged]
            + list(others.values()),
            "metrics",
        )
    if step.late is not None:
        # With a communicator of its own, nothing else has the update wait for them.
        step.late.communicated += sums
    sums, counts = sums[: len(sums) - len(others)], sums[len(sums) - len(others) :]
    totals, sums = sums[: len(metrics)], sums[len(metrics) :]
    means, sums = sums[: len(statistics)], sums[len(statistics) :]
    for variable, mean in zip(statistics, means, strict=True):
        variable.assign(mean)
    for i, mean in zip(averaged, sums, strict=True):
        values[i] = mean
    with keras.StatelessScope(list(zip(metrics, totals, strict=True))):
        results = tf.nest.map_structure(tf.convert_to_tensor, model.get_metrics_result())
    logs = tf.nest.pack_sequence_as(logs, values)
    for (name, _), count in zip(others.items(), counts, strict=True):
        results[name] = tf.where(count > 0, tf.cast(logs[name], results[name].dtype), results[name])
    return _with_results(logs, results), totals


def _other_values(model: keras.Model, step: Step, logs: Any) -> dict[str, tf.Tensor]:
    """Flags logs that have a metric's name but another value: 1 if they do on this replica.

    A custom step may log its loss as "loss", the name of Keras's running mean.
    """
    own = type(model).train_step is Model.train_step and type(model).test_step is Model.test_step
    if own or not isinstance(logs, dict):
        return {}
    results = model.get_metrics_result()
    named = {
        name: (tf.convert_to_tensor(logs[name]), tf.cast(result, logs[name].dtype))
        for name, result in results.items()
        if keras.ops.is_tensor(logs.get(name)) and keras.ops.is_tensor(result)
    }
    return {
        name: tf.cast(tf.reduce_any(log != result) & (step.share > 0), tf.float32)
        for name, (log, result) in named.items()
        if log.shape == result.shape
    }


def _with_results(logs: Any, results: dict[str, tf.Tensor]) -> Any:
    # A metric's result from the totals is exact; the mean of the replicas' results is not.
    if not isinstance(logs, dict):
        return logs
    return {k: results[k] if k in results else _with_results(v, results) for k, v in logs.items()}


def _changed_statistics(step: Step) -> list[Any]:
    # Moving averages and the like, which each replica has updated from its rows.
    return [
        v
        for v in step.written.values()
        if v.dtype not in (tf.string, tf.resource, tf.variant) and not is_seed_state(v)
    ]


def _metric_contribution(context: Any, step: Step, variable: Any) -> tf.Tensor:
    value = tf.convert_to_tensor(variable)
    if variable.value.aggregation == tf.VariableAggregation.SUM:
        return value
    if variable.value.aggregation == tf.VariableAggregation.ONLY_FIRST_REPLICA:
        return _from_first_replica(context, value)
    return _contribution(context, step, value)


def _contribution(context: Any, step: Step, value: tf.Tensor) -> tf.Tensor:
    # Floats are averaged by rows; for other types the first replica's value is used.
    if value.dtype.is_floating or value.dtype.is_complex:
        return step.scale_by_rows(value)
    return _from_first_replica(context, value)


def _from_first_replica(context: Any, value: tf.Tensor) -> tf.Tensor:
    replica, _ = context.strategy.extended.place_here()
    return tf.where(tf.equal(replica, 0), value, tf.zeros_like(value))
