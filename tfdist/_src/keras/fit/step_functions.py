"""The functions that Keras's loops call for each step when training on several workers."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfdist._src import native
from tfdist._src.comm import tracing
from tfdist._src.data import distribute
from tfdist._src.data.first_batch import unlike_rows
from tfdist._src.data.shares import BatchForm, fixed_rows, take_share, with_any_rows, without_rows
from tfdist._src.global_view.partition import Added
from tfdist._src.keras.fit import atomic_step, partitioned_step
from tfdist._src.keras.fit.atomic_step import AtomicStep
from tfdist._src.keras.fit.call_checks import running_call, training_call
from tfdist._src.keras.fit.compared_state import StateComparison, check_programs
from tfdist._src.keras.fit.compilation import make_function
from tfdist._src.keras.fit.data_position import batches_done
from tfdist._src.keras.fit.metric_state import metric_variables, take_over_metrics, totals_of
from tfdist._src.keras.fit.step_exchange import (
    as_heard,
    count_own_rows,
    count_rows,
    finds_unlike_shares,
    gather_sparse,
    heard,
    heard_nothing,
    last_programs,
    step_exchange,
    unlike_shares,
    untraced,
)
from tfdist._src.keras.optimizers.applying import keep_build
from tfdist._src.keras.optimizers.gradient_sync import Trial
from tfdist._src.monitoring.training import record
from tfdist._src.strategy import reduction
from tfdist._src.strategy.step import EagerGlobalStep
from tfdist._src.strategy.step_failure import running_step
from tfdist.errors import ProgramMismatchError


def wait_for(take: Callable[[], Any]) -> Any:
    """Takes a batch, or an optional one, eagerly or in a graph; call `received` afterwards.

    Args:
        take: takes the batch from an iterator.
    """
    if not native.has_ops():
        return take()
    begins = tracing.input_begins()
    with tf.control_dependencies([] if tf.executing_eagerly() else [begins]):
        return take()


def received(batch: Any) -> Any:
    """Returns a batch that a step has waited for."""
    if native.has_ops():
        parts = [] if tf.executing_eagerly() else tf.nest.flatten(batch, expand_composites=True)
        with tf.control_dependencies([part for part in parts if tf.is_tensor(part)]):
            tracing.input_ends()
    return batch


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
        told: the number of rows of the whole batch, encoded by the shares; see `WithRows`.
        shared: whether the replicas hold shares of one batch that every replica has in full.

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
    """The number of rows of the whole batch, followed by the values that the workers exchanged."""
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


def make_step_function(
    model: keras.Model, step_function: Callable[[Any], Any], *, trains: bool = False
) -> Callable[[Iterator[Any]], Any]:
    """Makes the function of `fit` and `evaluate`, which maps an iterator's next batches to logs.

    Args:
        model: the model, compiled under a tfdist strategy.
        step_function: `model.train_step` or `model.test_step`.
        trains: whether it is `model.train_step`, whose steps and rows are recorded.
    """
    strategy = model.distribute_strategy
    take_over_metrics(model)
    alone = not strategy.extended.communicates

    def one_step(batch: Any, form: BatchForm, late: Trial | None) -> Any:
        if tf.executing_eagerly() and not alone:
            batch, told = without_rows(batch)
            whole = distribute.without_none_components(batch)
            return run_eager_step(model, step_function, whole, told, shared=form.shared)

        added: Added = []

        def replica_step(shard: Any) -> Any:
            if alone:
                return (
                    step_function(distribute.without_none_components(shard)),
                    [],
                    tf.constant([0]),
                )
            shard, told = without_rows(shard)
            shard = _as_traced(shard, form.rows, strategy)
            return partitioned_step.run_partitioned_step(
                model, step_function, shard, form, added, told, late=late
            )

        results = strategy.run(replica_step, args=(batch,))
        return tf.nest.map_structure(lambda v: strategy.experimental_local_results(v)[0], results)

    def compile_step(late: Trial | None = None) -> Callable[..., Any]:
        def step(batch: Any, form: BatchForm) -> Any:
            return one_step(batch, form, late)

        return make_function(model, step)

    progress = strategy.extended.progress
    atomic = trains and atomic_step.applies(strategy)
    run_step = AtomicStep(model, compile_step) if atomic else compile_step()
    several = max(1, model.steps_per_execution)
    kept = totals_of(model) if trains else None

    sizes = _Sizes()
    state_of = StateComparison(model)

    def run_one(batch: Any, form: BatchForm) -> Any:
        # Rows are counted outside the step, which XLA may compile for a GPU: they stay on the host.
        rows = count_own_rows(strategy, without_rows(batch)[0])
        own = tf.stack([rows, _rows_told(strategy, batch)])
        logs, totals, counts = run_step(batch, form)
        if kept is not None:
            kept.keep(totals)
        counts = tf.concat([own[:1], heard_nothing()], axis=0) if alone else counts
        return (logs, totals), tf.concat([own, counts], axis=0)

    def steps_of_iterator(iterator: Any, several: Any, form: BatchForm) -> Any:
        results, rows = run_one(received(wait_for(iterator.get_next)), form)
        steps = 1
        if model.steps_per_execution <= 1:
            return results, steps, rows
        if model.run_eagerly:
            for _ in range(int(several) - 1):
                batch = wait_for(iterator.get_next_as_optional)
                if not batch.has_value():
                    break
                results, more = run_one(received(batch.get_value()), form)
                steps, rows = steps + 1, rows + more
            return results, steps, rows
        one_of_loop = functools.partial(run_one, form=form)
        return _loop(one_of_loop, iterator, several, results, rows)

    if not model.run_eagerly:
        steps_of_iterator = tf.function(steps_of_iterator, reduce_retracing=True, autograph=False)

    def function(iterator: Any) -> Any:
        data = iterator if isinstance(iterator, tf.distribute.DistributedIterator) else None
        call = training_call() if trains and data is not None else None
        step_exchange.publish(0 if alone else state_of.number(call, several, data))
        if trains:
            keep_build(model.optimizer, if_updated=True)
        undoing = progress.undoing if atomic else contextlib.nullcontext
        part = None
        with running_step(strategy.extended.group, eager=model.run_eagerly), undoing():
            if isinstance(iterator, (tf.data.Iterator, tf.distribute.DistributedIterator)):
                in_part = kept is not None and several > 1
                to_run = tf.constant(several - batches_done()) if in_part else several
                form = distribute.form_of_batches(iterator, getattr(iterator, "batch_rows", None))
                (logs, totals), steps, rows = steps_of_iterator(iterator, to_run, form)
            else:
                steps, rows = 0, _no_rows()
                for _, batch in zip(range(several), iterator, strict=False):
                    part = _local_part(strategy, batch, sizes)
                    with part.compared():
                        (logs, totals), more = run_one(part.shards, part.form)
                    steps, rows = steps + 1, rows + more
        own, whole, everyone, *numbers = rows.numpy().tolist()
        heard = as_heard(numbers)
        if heard.rows_differ:
            raise part.unlike_rows() if part else unlike_rows(strategy.extended.group, own, whole)
        if heard.program_differs:
            check_programs(strategy.extended.group)
        if not strategy.extended.group.elastic:
            last_programs.clear()
        if heard.state_differs:
            state_of.check()
        if trains:
            keep_build(model.optimizer)
            progress.add(int(steps), logged=atomic)
            record.add(int(steps), own, everyone)
            partitioned_step.note_rows(model, everyone // max(1, int(steps)))
            step_exchange.grant(step_exchange.wanted if alone else heard.asked)
        if totals:
            for variable, total in zip(metric_variables(model), totals, strict=True):
                variable.value.know_total(total)
        return logs

    return function


def _no_rows() -> tf.Tensor:
    """The result of a step without rows: own, encoded and all rows, then the exchanged values."""
    return tf.concat([[0, 0, 0], heard_nothing()], axis=0)


def _rows_told(strategy: Any, batch: Any) -> tf.Tensor:
    """The number of rows of the whole batch, if the batch encodes it; else 0."""
    _, told = without_rows(batch)
    if told is None:
        return tf.constant(0)
    halves = strategy.experimental_local_results(told)[0][::2]
    return tf.reduce_sum(tf.bitwise.left_shift(halves, 15 * tf.range(tf.size(halves))))


def make_predict_function(model: keras.Model) -> Callable[[list[Any]], Any]:
    """Makes the function of `predict`, which maps a list of batches to the outputs of all rows."""
    strategy = model.distribute_strategy
    sizes = _Sizes()

    def one_step(batch: Any, form: BatchForm) -> Any:
        alone = not strategy.extended.communicates
        if tf.executing_eagerly() and not alone:
            batch, told = without_rows(batch)
            return run_eager_prediction(
                model, distribute.without_none_components(batch), told, shared=form.shared
            )

        added: Added = []

        def replica_step(shard: Any) -> Any:
            if alone:
                return model.predict_step(distribute.without_none_components(shard))
            shard, told = without_rows(shard)
            shard = _as_traced(shard, form.rows, strategy)
            return partitioned_step.run_partitioned_prediction(model, shard, form, added, told)

        outputs = strategy.run(replica_step, (batch,))
        if alone:
            return outputs, heard_nothing()
        return tf.nest.map_structure(
            lambda output: strategy.experimental_local_results(output)[0], outputs
        )

    run_one = make_function(model, one_step)

    state_of = StateComparison(model)

    def function(batches: list[Any]) -> Any:
        compares = strategy.extended.communicates
        data = running_call()
        step_exchange.publish(state_of.number(None, len(batches), data) if compares else 0)
        with running_step(strategy.extended.group, eager=model.run_eagerly):
            parts = [_local_part(strategy, batch, sizes) for batch in batches]
            results = []
            for part in parts:
                with part.compared():
                    results.append(run_one(part.shards, part.form))
        for (_, numbers), part in zip(results, parts, strict=True):
            heard = as_heard(numbers.numpy().tolist())
            if heard.rows_differ:
                raise part.unlike_rows()
            if heard.program_differs:
                check_programs(strategy.extended.group)
            if heard.state_differs:
                state_of.check()
        if not strategy.extended.group.elastic:
            last_programs.clear()
        outputs = [output for output, _ in results]
        if len(outputs) == 1:
            return outputs[0]
        return tf.nest.map_structure(lambda *parts: tf.concat(parts, axis=0), *outputs)

    return function


def shard_batch(strategy: tf.distribute.Strategy, batch: Any) -> Any:
    """Splits a batch held by all workers into local shards, unless it is already split."""
    replicas = strategy.num_replicas_in_sync
    flat = [leaf for leaf in tf.nest.flatten(batch) if leaf is not None]
    if not strategy.extended.communicates or any(
        isinstance(v, tf.distribute.DistributedValues) for v in flat
    ):
        return batch
    if isinstance(batch, list):
        batch = tuple(batch)
    tensors = distribute.as_tensors(batch)
    fixed = None if strategy.extended.group.elastic else replicas

    def shard(context: Any) -> Any:
        return take_share(tensors, context.replica_id_in_sync_group, replicas, fixed)

    return strategy.experimental_distribute_values_from_function(shard)


class _Sizes:
    """The number of rows of the first batch; no other number is fixed in a trace."""

    def __init__(self) -> None:
        self._first: int | None = None

    def known(self, rows: int | None) -> int | None:
        """The number of rows of a batch, if it equals that of the first batch; else None."""
        if self._first is None:
            self._first = rows
        return rows if rows == self._first else None

    def forget(self) -> None:
        """Treats the next batch as the first, since this one differs between workers."""
        self._first = None


class _LocalPart(NamedTuple):
    """The local replicas' part of a batch.

    Attributes:
        strategy: the strategy.
        shards: the rows of each replica.
        form: the properties of the batch that the model may depend on.
        sizes: the sizes of the batches so far.
        rows: the number of rows of the whole batch, if this worker holds it; else 0.
    """

    strategy: Any
    shards: Any
    form: BatchForm
    sizes: _Sizes
    rows: int = 0

    @contextlib.contextmanager
    def compared(self) -> Iterator[None]:
        """Within this context, a step checks that all workers' batches have equal numbers of rows.

        Raises:
            ProgramMismatchError: the numbers differ.
        """
        step_exchange.publish_rows(self.rows)
        try:
            yield
        except tf.errors.InvalidArgumentError as error:
            if not finds_unlike_shares(error):
                raise
            raise self.unlike_rows() from None

    def unlike_rows(self) -> ProgramMismatchError:
        """The error to raise if the workers' batches differ; called by all workers."""
        self.sizes.forget()
        own = int(count_own_rows(self.strategy, without_rows(self.shards)[0]))
        whole = self.rows or int(_rows_told(self.strategy, self.shards))
        return unlike_rows(self.strategy.extended.group, own, whole)


def _local_part(strategy: Any, batch: Any, sizes: _Sizes) -> _LocalPart:
    if not strategy.extended.communicates:
        return _LocalPart(strategy, batch, BatchForm(), sizes)
    shards = shard_batch(strategy, batch)
    given = shards is not batch
    form = distribute.form_of(batch) if given else distribute.form_of_next()
    # In elastic jobs, the size of such batches often depends on the number of workers.
    known = None if strategy.extended.group.elastic else sizes.known(form.rows)
    rows = int(count_rows(partitioned_step.divided(batch, form))) if given else 0
    return _LocalPart(strategy, shards, form._replace(rows=known, given=given), sizes, rows)


def _as_traced(shard: Any, rows: int | None, strategy: Any) -> Any:
    """A replica's rows; a trace fixes their number only if it is the same on all replicas."""
    shard = distribute.without_none_components(shard)
    extended = strategy.extended
    if not extended.group.elastic and fixed_rows(rows, extended.replica_count) is not None:
        return shard
    return tf.nest.map_structure(_with_any_rows, shard)


def _with_any_rows(component: Any) -> Any:
    return with_any_rows(component) if isinstance(component, tf.Tensor) else component


def _loop(
    one_step: Callable[[Any], Any], iterator: Any, steps: int, results: Any, rows: tf.Tensor
) -> Any:
    def more(going: tf.Tensor, results: Any, done: tf.Tensor, rows: tf.Tensor) -> tf.Tensor:
        return tf.logical_and(going, done < steps)

    def again(going: tf.Tensor, results: Any, done: tf.Tensor, rows: tf.Tensor) -> Any:
        batch = wait_for(iterator.get_next_as_optional)
        going = batch.has_value()
        results, new = tf.cond(
            going, lambda: one_step(received(batch.get_value())), lambda: (results, _no_rows())
        )
        return going, results, done + tf.cast(going, tf.int32), rows + new

    return tf.while_loop(more, again, (True, results, 1, rows), parallel_iterations=1)[1:]
