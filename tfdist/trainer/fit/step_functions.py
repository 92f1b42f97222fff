"""The functions that Keras's loops call for each step, made for replicas on many workers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from tfdist.errors import UnsupportedError
from tfdist.strategies.data import fixed_rows, take_share, with_any_rows
from tfdist.strategies.step_failure import running_step
from tfdist.trainer.fit.empty_replicas import with_a_row, without_it
from tfdist.trainer.fit.replica_step import count_rows, metric_variables, run_replica_step
from tfdist.trainer.losses.metrics import take_over_metrics


def make_step_function(
    model: keras.Model, step_function: Callable[[Any], Any]
) -> Callable[[Iterator[Any]], Any]:
    """What `fit` and `evaluate` call: takes the next batches of an iterator, returns the logs.

    Args:
        model: the model, compiled under a tfdist strategy.
        step_function: `model.train_step` or `model.test_step`.

    Raises:
        UnsupportedError: XLA was asked for, and there is more than one replica.
    """
    strategy = model.distribute_strategy
    take_over_metrics(model)

    def one_step(batch: Any, fixed: bool = True) -> Any:
        def replica_step(share: Any) -> Any:
            return run_replica_step(model, step_function, _as_traced(share, fixed))

        results = strategy.run(replica_step, args=(batch,))
        return tf.nest.map_structure(lambda v: strategy.experimental_local_results(v)[0], results)

    run_one = _compiled(model, one_step)
    several = max(1, model.steps_per_execution)

    def steps_of_iterator(iterator: Any) -> Any:
        results = run_one(iterator.get_next())
        if several == 1:
            return results
        if model.run_eagerly:
            for _ in range(several - 1):
                batch = iterator.get_next_as_optional()
                if not batch.has_value():
                    break
                results = run_one(batch.get_value())
            return results
        return _loop(run_one, iterator, several, results)

    if not model.run_eagerly:
        steps_of_iterator = tf.function(steps_of_iterator, reduce_retracing=True, autograph=False)

    def function(iterator: Any) -> Any:
        with running_step(strategy.extended.group, eager=model.run_eagerly):
            if isinstance(iterator, (tf.data.Iterator, tf.distribute.DistributedIterator)):
                logs, totals = steps_of_iterator(iterator)
            else:
                for _, batch in zip(range(several), iterator, strict=False):
                    logs, totals = run_one(*_shares(strategy, batch))
        if totals:
            for variable, total in zip(metric_variables(model), totals, strict=True):
                variable.value.know_total(total)
        return logs

    return function


def make_predict_function(model: keras.Model) -> Callable[[list[Any]], Any]:
    """What `predict` calls: takes a list of batches, returns the outputs for all their rows."""
    strategy = model.distribute_strategy

    def one_step(batch: Any, fixed: bool) -> Any:
        def replica_step(share: Any) -> Any:
            share = _as_traced(share, fixed)
            if strategy.num_replicas_in_sync == 1:
                return model.predict_step(share)
            rows = count_rows(share)
            return without_it(model.predict_step(with_a_row(share, rows)), rows)

        outputs = strategy.run(replica_step, (batch,))
        if strategy.num_replicas_in_sync == 1:
            return outputs
        return tf.nest.map_structure(
            lambda output: strategy.extended.gather_rows(
                strategy.experimental_local_results(output)
            ),
            outputs,
        )

    run_one = _compiled(model, one_step)

    def function(batches: list[Any]) -> Any:
        with running_step(strategy.extended.group, eager=model.run_eagerly):
            outputs = [run_one(*_shares(strategy, batch)) for batch in batches]
        if len(outputs) == 1:
            return outputs[0]
        return tf.nest.map_structure(lambda *parts: tf.concat(parts, axis=0), *outputs)

    return function


def share_out(strategy: tf.distribute.Strategy, batch: Any) -> Any:
    """Cuts a batch that all workers hold into the local replicas' shares, where it is not yet."""
    replicas = strategy.num_replicas_in_sync
    flat = [leaf for leaf in tf.nest.flatten(batch) if leaf is not None]
    if replicas == 1 or any(isinstance(v, tf.distribute.DistributedValues) for v in flat):
        return batch
    if isinstance(batch, list):
        batch = tuple(batch)
    tensors = tf.nest.map_structure(lambda v: v if v is None else tf.convert_to_tensor(v), batch)

    def share(context: Any) -> Any:
        return take_share(tensors, context.replica_id_in_sync_group, replicas)

    return strategy.experimental_distribute_values_from_function(share)


def _shares(strategy: tf.distribute.Strategy, batch: Any) -> tuple[Any, bool]:
    """The local replicas' shares of a batch, and whether a model may know how many rows they have.

    The shares that a dataset has cut are here with sizes of their own, as if all had that many.
    """
    replicas = strategy.num_replicas_in_sync
    shares = share_out(strategy, batch)
    if replicas == 1:
        return shares, True
    leaves = [leaf for leaf in tf.nest.flatten(batch) if leaf is not None]
    if shares is batch:
        local = [v for leaf in leaves for v in strategy.experimental_local_results(leaf)]
        return shares, all(_rows(v) is None or _rows(v) > 1 for v in local)
    return shares, all(fixed_rows(_rows(leaf), replicas) is not None for leaf in leaves)


def _rows(component: Any) -> Any:
    shape: Any = getattr(component, "shape", ())
    return shape[0] if len(shape) else None


def _as_traced(share: Any, fixed: bool) -> Any:
    share = without_optionals(share)
    return share if fixed else tf.nest.map_structure(_with_any_rows, share)


def _with_any_rows(component: Any) -> Any:
    return with_any_rows(component) if isinstance(component, tf.Tensor) else component


def without_optionals(batch: Any) -> Any:
    """Puts None where a dataset, which cannot hold None, has an empty optional."""
    return tf.nest.map_structure(
        lambda v: None if isinstance(v, tf.experimental.Optional) else v, batch
    )


def _compiled(model: keras.Model, one_step: Callable[..., Any]) -> Callable[..., Any]:
    if model.run_eagerly:
        return one_step
    if model.jit_compile and model.distribute_strategy.num_replicas_in_sync > 1:
        raise UnsupportedError(
            "jit_compile=True is not possible with several replicas: XLA cannot compile the "
            "collectives between them. Compile the model with jit_compile=False."
        )
    return tf.function(  # type: ignore[no-any-return]
        one_step, reduce_retracing=True, autograph=False, jit_compile=model.jit_compile or None
    )


def _loop(one_step: Callable[[Any], Any], iterator: Any, steps: int, results: Any) -> Any:
    def more(done: tf.Tensor, going: tf.Tensor, results: Any) -> tf.Tensor:
        return tf.logical_and(going, done < steps)

    def again(done: tf.Tensor, going: tf.Tensor, results: Any) -> Any:
        batch = iterator.get_next_as_optional()
        going = batch.has_value()
        results = tf.cond(going, lambda: one_step(batch.get_value()), lambda: results)
        return done + 1, going, results

    return tf.while_loop(more, again, (1, True, results), parallel_iterations=1)[2]
