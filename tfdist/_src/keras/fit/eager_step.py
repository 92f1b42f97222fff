"""Steps that run eagerly: every replica runs them on the whole batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfdist._src.keras.fit.metric_state import metric_variables
from tfdist._src.keras.fit.own_rows import count_own_rows, gather_sparse, unlike_shares
from tfdist._src.keras.fit.step_exchange import heard, step_exchange, untraced
from tfdist._src.strategy import reduction
from tfdist._src.strategy.step import EagerGlobalStep


def run_eager_step(
    model: keras.Model,
    step_function: Callable[[Any], Any],
    batch: Any,
    told: Any = None,
    *,
    shared: bool,
) -> tuple[Any, Any, Any]:
    """Runs `train_step` or `test_step` on the whole batch, on each replica.

    Args:
        model: the model.
        step_function: `model.train_step` or `model.test_step`.
        batch: the rows of the local replicas.
        told: what their shares tell of the rows of the whole batch; see `WithRows`.
        shared: whether the replicas have shares of one batch, of which each has all rows.

    Returns:
        The same as `run_partitioned_step`.
    """
    strategy = model.distribute_strategy
    extended = strategy.extended
    counted = _exchanged(strategy, batch, told, shared=shared)
    whole = _gathered(strategy, batch)
    summed = _summed(model)
    copies = [tf.add_n([tf.identity(c) for c in v.value.values]) for v in summed]
    totals = reduction.sum_values(extended.workers, copies, "metrics")

    def replica_step(whole: Any) -> Any:
        leads = _leads(extended)
        for variable, total in zip(summed, totals, strict=True):
            variable.assign(total)
        with EagerGlobalStep(leads):
            logs = tf.nest.map_structure(tf.convert_to_tensor, step_function(whole))
            state = [tf.identity(tf.convert_to_tensor(v)) for v in metric_variables(model)]
            if not leads:
                for variable in _summed(model):
                    variable.assign(tf.zeros_like(variable))
        return logs, state

    logs, state = _of_first(strategy, strategy.run(replica_step, (whole,)))
    return logs, state, counted


def run_eager_prediction(
    model: keras.Model, batch: Any, told: Any = None, *, shared: bool
) -> tuple[Any, Any]:
    """Runs `predict_step` on the whole batch, on each replica.

    Args:
        model: the model.
        batch: the rows of the local replicas.
        told: as for `run_eager_step`.
        shared: as for `run_eager_step`.

    Returns:
        The same as `run_partitioned_prediction`.
    """
    strategy = model.distribute_strategy
    numbers = _exchanged(strategy, batch, told, shared=shared)[1:]

    def replica_step(whole: Any) -> Any:
        with EagerGlobalStep(_leads(strategy.extended)):
            return model.predict_step(whole)

    outputs = strategy.run(replica_step, (_gathered(strategy, batch),))
    return _of_first(strategy, outputs), numbers


def _exchanged(
    strategy: tf.distribute.Strategy, batch: Any, told: Any, *, shared: bool
) -> tf.Tensor:
    """The number of rows of the whole batch, followed by what the workers tell one another."""
    extended = strategy.extended
    rank, workers = extended.workers.place()
    own = tf.one_hot(rank, workers, count_own_rows(strategy, batch), 0, dtype=tf.int32)
    told = None if told is None else strategy.experimental_local_results(told)[0]
    own = tf.concat([own, step_exchange.in_graph(told), untraced()], axis=0)
    sums = reduction.sum_values(extended.workers, [own], "rows")[0]
    counts, devices = sums[:workers], len(extended.worker_devices)
    total = tf.reduce_sum(counts)
    unlike = unlike_shares(counts, total, devices) if shared else 0
    return tf.concat([[total], heard(sums[workers:], workers, unlike)], axis=0)


def _leads(extended: Any) -> bool:
    replica, _ = extended.place_here()
    return int(replica) == 0


def _of_first(strategy: tf.distribute.Strategy, results: Any) -> Any:
    return tf.nest.map_structure(lambda v: strategy.experimental_local_results(v)[0], results)


def _summed(model: keras.Model) -> list[Any]:
    """The metric variables whose value is the sum of the replicas' copies."""
    summed = tf.VariableAggregation.SUM
    return [v for v in metric_variables(model) if v.value.aggregation == summed]


def _gathered(strategy: tf.distribute.Strategy, batch: Any) -> Any:
    """The batch with the rows of all replicas."""

    def gather(leaf: Any) -> Any:
        parts = list(strategy.experimental_local_results(leaf))
        if parts[0] is None:
            return None
        if isinstance(parts[0], tf.SparseTensor):
            return _gathered_sparse(strategy.extended, parts)
        if not isinstance(parts[0], tf.RaggedTensor) and not parts[0].shape.rank:
            return parts[0]
        return strategy.extended.gather_rows(parts)

    return tf.nest.map_structure(gather, batch)


def _gathered_sparse(extended: Any, parts: Any) -> tf.SparseTensor:
    local = tf.sparse.concat(0, parts)
    rank, _ = extended.workers.place()
    rows = extended.gather_rows([local.dense_shape[:1]])
    first, total = tf.reduce_sum(rows[:rank]), tf.reduce_sum(rows)
    return gather_sparse(local, first, total, lambda own: extended.gather_rows([own]))
