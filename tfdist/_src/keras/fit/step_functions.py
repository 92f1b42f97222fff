"""The step functions of `fit`, `evaluate` and `predict` under a tfdist strategy."""

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
from tfdist._src.data.call_context import current_context
from tfdist._src.data.first_batch import unlike_rows
from tfdist._src.data.shares import BatchForm, fixed_rows, take_share, with_any_rows, without_rows
from tfdist._src.global_view.partition import Added
from tfdist._src.keras.fit import atomic_step, metric_state, partitioned_step
from tfdist._src.keras.fit.atomic_step import AtomicStep
from tfdist._src.keras.fit.compared_state import StateComparison, check_programs
from tfdist._src.keras.fit.compilation import make_function
from tfdist._src.keras.fit.step_exchange import (
    as_heard,
    count_local_rows,
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
from tfdist._src.keras.fit.training_data import take_batches_done
from tfdist._src.keras.optimizers.applying import keep_build
from tfdist._src.keras.optimizers.gradient_sync import DeferralTrial
from tfdist._src.monitoring.training import record
from tfdist._src.strategy import reduction
from tfdist._src.strategy.extended import ReplicatedExtended, extended_of
from tfdist._src.strategy.step import EagerGlobalStep
from tfdist._src.strategy.step_failure import running_step
from tfdist.errors import ProgramMismatchError


def wait_for(take: Callable[[], Any]) -> Any:
    """Takes the next batch of an iterator, and records when the wait for the batch begins.

    This function works eagerly and in a graph. Call `received` with its result.

    Args:
        take: takes the batch from the iterator, or a `tf.experimental.Optional` of it.
    """
    if not native.has_ops():
        return take()
    begins = tracing.input_begins()
    with tf.control_dependencies([] if tf.executing_eagerly() else [begins]):
        return take()


def received(batch: Any) -> Any:
    """Records that the wait for a batch of `wait_for` has ended, and returns the batch."""
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
    """Runs `train_step` or `test_step` eagerly. Each replica computes all rows of the whole batch.

    Args:
        model: the model.
        step_function: `model.train_step` or `model.test_step`.
        batch: the rows of the local replicas.
        told: the encoded number of rows of the whole batch, if the batch contains it (see
            `WithRows`); else None.
        shared: as for `exchange_rows`.

    Returns:
        The same as `run_partitioned_step`.
    """
    strategy = model.distribute_strategy
    extended = extended_of(strategy)
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
            state = [
                tf.identity(tf.convert_to_tensor(v)) for v in metric_state.metric_variables(model)
            ]
            if not leads:
                for variable in _summed(model):
                    variable.assign(tf.zeros_like(variable))
        return logs, state

    logs, state = _of_first(strategy, strategy.run(replica_step, (whole,)))
    return logs, state, counted


def run_eager_prediction(
    model: keras.Model, batch: Any, told: Any = None, *, shared: bool
) -> tuple[Any, Any]:
    """Runs `predict_step` eagerly. Each replica computes all rows of the whole batch.

    Args:
        model: the model.
        batch: the rows of the local replicas.
        told: as for `run_eager_step`.
        shared: as for `exchange_rows`.

    Returns:
        The same as `run_partitioned_prediction`.
    """
    strategy = model.distribute_strategy
    numbers = _exchanged(strategy, batch, told, shared=shared)[1:]

    def replica_step(whole: Any) -> Any:
        with EagerGlobalStep(_leads(extended_of(strategy))):
            return model.predict_step(whole)

    outputs = strategy.run(replica_step, (_gathered(strategy, batch),))
    return _of_first(strategy, outputs), numbers


def _exchanged(
    strategy: tf.distribute.Strategy, batch: Any, told: Any, *, shared: bool
) -> tf.Tensor:
    """Exchanges the workers' row counts. Returns their sum, followed by the result of `heard`."""
    extended = extended_of(strategy)
    rank, workers = extended.workers.place()
    own = tf.one_hot(rank, workers, count_local_rows(strategy, batch), 0, dtype=tf.int32)
    told = None if told is None else strategy.experimental_local_results(told)[0]
    own = tf.concat([own, step_exchange.in_graph(told), untraced()], axis=0)
    sums = reduction.sum_values(extended.workers, [own], "rows")[0]
    counts, devices = sums[:workers], len(extended.worker_devices)
    total = tf.reduce_sum(counts)
    unlike = unlike_shares(counts, total, devices) if shared else 0
    return tf.concat([[total], heard(sums[workers:], workers, unlike)], axis=0)


def _leads(extended: ReplicatedExtended) -> bool:
    replica, _ = extended.place_here()
    return int(replica) == 0


def _of_first(strategy: tf.distribute.Strategy, results: Any) -> Any:
    return tf.nest.map_structure(lambda v: strategy.experimental_local_results(v)[0], results)


def _summed(model: keras.Model) -> list[Any]:
    """Returns the metric variables with a value that is the sum of the replicas' copies."""
    summed = tf.VariableAggregation.SUM
    return [v for v in metric_state.metric_variables(model) if v.value.aggregation == summed]


def _gathered(strategy: tf.distribute.Strategy, batch: Any) -> Any:
    """Returns the batch with the rows of all replicas."""

    def gather(leaf: Any) -> Any:
        parts = list(strategy.experimental_local_results(leaf))
        if parts[0] is None:
            return None
        if isinstance(parts[0], tf.SparseTensor):
            return _gathered_sparse(extended_of(strategy), parts)
        if not isinstance(parts[0], tf.RaggedTensor) and not parts[0].shape.rank:
            return parts[0]
        return extended_of(strategy).gather_rows(parts)

    return tf.nest.map_structure(gather, batch)


def _gathered_sparse(extended: ReplicatedExtended, parts: Any) -> tf.SparseTensor:
    local = tf.sparse.concat(0, parts)
    rank, _ = extended.workers.place()
    rows = extended.gather_rows([local.dense_shape[:1]])
    first, total = tf.reduce_sum(rows[:rank]), tf.reduce_sum(rows)
    return gather_sparse(local, first, total, lambda own: extended.gather_rows([own]))


class _ModelStep:
    """Runs a model's step on one batch, in a graph or eagerly.

    Args:
        model: the model, compiled under a tfdist strategy.
        step_function: `model.train_step` or `model.test_step`.

    Attributes:
        is_alone: whether there is a single replica, and there will never be another one.
    """

    def __init__(self, model: keras.Model, step_function: Callable[[Any], Any]) -> None:
        self._model, self._step_function = model, step_function
        self._strategy = model.distribute_strategy
        self.is_alone = not extended_of(self._strategy).communicates

    def compile(self, late: DeferralTrial | None = None) -> Callable[..., Any]:
        """Returns the function that runs the step, given a batch and its `BatchForm`.

        Args:
            late: as for `run_partitioned_step`.
        """

        def step(batch: Any, form: BatchForm) -> Any:
            return self._run(batch, form, late)

        return make_function(self._model, step)

    def _run(self, batch: Any, form: BatchForm, late: DeferralTrial | None) -> Any:
        if tf.executing_eagerly() and not self.is_alone:
            batch, told = without_rows(batch)
            whole = distribute.without_none_components(batch)
            return run_eager_step(self._model, self._step_function, whole, told, shared=form.shared)

        added: Added = []

        def replica_step(shard: Any) -> Any:
            if self.is_alone:
                return (
                    self._step_function(distribute.without_none_components(shard)),
                    [],
                    tf.constant([0]),
                )
            shard, told = without_rows(shard)
            shard = _as_traced(shard, form.rows, self._strategy)
            return partitioned_step.run_partitioned_step(
                self._model, self._step_function, shard, form, added, told, late=late
            )

        return _of_first(self._strategy, self._strategy.run(replica_step, args=(batch,)))


class _Steps:
    """Runs steps on batches, and counts their rows.

    Args:
        model: the model.
        run_step: the compiled step.
        kept_totals: stores the totals of the metrics after each step; None if they are not stored.
        is_alone: whether there is a single replica, and there will never be another one.
    """

    def __init__(
        self,
        model: keras.Model,
        run_step: Callable[..., Any],
        kept_totals: metric_state.MetricTotals | None,
        *,
        is_alone: bool,
    ) -> None:
        self._model, self._run_step = model, run_step
        self._strategy = model.distribute_strategy
        self._kept_totals, self._is_alone = kept_totals, is_alone

    def run_one(self, batch: Any, form: BatchForm) -> Any:
        """Runs a step on a batch.

        Returns:
            The logs and the totals of the metrics, and a vector. The vector consists of the number
            of this worker's rows; the number of rows of the whole batch as encoded in the batch, or
            0 if the batch does not contain it; the number of rows of all workers, as exchanged; and
            the result of `heard`.
        """
        # Rows are counted on the host, outside the step, since XLA may compile the step for a GPU.
        rows = count_local_rows(self._strategy, without_rows(batch)[0])
        own = tf.stack([rows, _rows_told(self._strategy, batch)])
        logs, totals, counts = self._run_step(batch, form)
        if self._kept_totals is not None:
            self._kept_totals.keep(totals)
        counts = tf.concat([own[:1], heard_nothing()], axis=0) if self._is_alone else counts
        return (logs, totals), tf.concat([own, counts], axis=0)

    def steps_of_iterator(self, iterator: Any, several: Any, form: BatchForm) -> Any:
        """Runs steps on the next batches of an iterator.

        Args:
            iterator: the iterator.
            several: the maximum number of steps.
            form: the known properties of the batches.

        Returns:
            The results of the last step, the number of steps, and the sum of the vectors of
            `run_one`.
        """
        results, rows = self.run_one(received(wait_for(iterator.get_next)), form)
        steps = 1
        if self._model.steps_per_execution <= 1:
            return results, steps, rows
        if self._model.run_eagerly:
            for _ in range(int(several) - 1):
                batch = wait_for(iterator.get_next_as_optional)
                if not batch.has_value():
                    break
                results, more = self.run_one(received(batch.get_value()), form)
                steps, rows = steps + 1, rows + more
            return results, steps, rows
        one_of_loop = functools.partial(self.run_one, form=form)
        return _loop(one_of_loop, iterator, several, results, rows)


class _Ran(NamedTuple):
    """The results of one call of the step function, which may run several steps.

    Attributes:
        logs: the logs of the last step.
        totals: the totals of the metrics; empty if the step has not summed the metrics.
        steps: the number of steps.
        rows: the sum of the vectors of `_Steps.run_one`.
        part: the local part of the last batch; None if a TensorFlow iterator provides the batches.
    """

    logs: Any
    totals: Any
    steps: Any
    rows: tf.Tensor
    part: _LocalPart | None


class StepFunction:
    """The step function of `fit` and `evaluate`, which runs steps on an iterator's next batches.

    Args:
        model: the model, compiled under a tfdist strategy.
        step_function: `model.train_step` or `model.test_step`.
        trains: whether `step_function` is `model.train_step`. If so, the numbers of steps and rows
            are recorded.
    """

    def __init__(
        self, model: keras.Model, step_function: Callable[[Any], Any], *, trains: bool = False
    ) -> None:
        self._model, self._trains = model, trains
        self._strategy = model.distribute_strategy
        self._extended = extended_of(self._strategy)
        metric_state.take_over_metrics(model)
        step = _ModelStep(model, step_function)
        self._is_alone = step.is_alone
        self._is_atomic = trains and atomic_step.applies(self._strategy)
        run_step = AtomicStep(model, step.compile) if self._is_atomic else step.compile()
        self._several = max(1, model.steps_per_execution)
        kept_totals = metric_state.totals_of(model) if trains else None
        self._keeps_totals = kept_totals is not None
        # The steps are run by a separate object. If the `tf.function` below held `self`, the cycle
        # of references would delay the release of its graphs.
        self._steps = _Steps(model, run_step, kept_totals, is_alone=self._is_alone)
        self._steps_of_iterator = self._steps.steps_of_iterator
        if not model.run_eagerly:
            self._steps_of_iterator = tf.function(
                self._steps.steps_of_iterator, reduce_retracing=True, autograph=False
            )
        self._sizes = _Sizes()
        self._state = StateComparison(model)

    def run(self, iterator: Iterator[Any]) -> Any:
        """Runs the next steps, and returns the logs of the last step.

        Args:
            iterator: yields batches.

        Raises:
            ProgramMismatchError: the workers have different data, programs or state.
        """
        self._publish_state(iterator)
        if self._trains:
            keep_build(self._model.optimizer, if_updated=True)
        undoing = self._extended.progress.undoing if self._is_atomic else contextlib.nullcontext
        with running_step(self._extended.group, eager=self._model.run_eagerly), undoing():
            if isinstance(iterator, (tf.data.Iterator, tf.distribute.DistributedIterator)):
                ran = self._run_on_iterator(iterator)
            else:
                ran = self._run_on_batches(iterator)
        self._finish(ran)
        return ran.logs

    def _publish_state(self, iterator: Any) -> None:
        """Sets the checksum of this worker's state, which the next step sends for a comparison."""
        if self._is_alone:
            step_exchange.publish(0)
            return
        data = iterator if isinstance(iterator, tf.distribute.DistributedIterator) else None
        call = current_context().training_call if self._trains and data is not None else None
        step_exchange.publish(self._state.number(call, self._several, data))

    def _run_on_iterator(self, iterator: Any) -> _Ran:
        several: Any = self._several
        if self._keeps_totals and several > 1:
            several = tf.constant(several - take_batches_done())
        form = distribute.form_of_batches(iterator, getattr(iterator, "batch_rows", None))
        (logs, totals), steps, rows = self._steps_of_iterator(iterator, several, form)
        return _Ran(logs, totals, steps, rows, None)

    def _run_on_batches(self, batches: Iterator[Any]) -> _Ran:
        steps, rows = 0, _no_rows()
        logs, totals, part = None, None, None
        for _, batch in zip(range(self._several), batches, strict=False):
            part = _local_part(self._strategy, batch, self._sizes)
            with part.compared():
                (logs, totals), more = self._steps.run_one(part.shards, part.form)
            steps, rows = steps + 1, rows + more
        return _Ran(logs, totals, steps, rows, part)

    def _finish(self, ran: _Ran) -> None:
        """Checks the values that the workers exchanged, and records the steps."""
        own, whole, everyone, *numbers = ran.rows.numpy().tolist()
        heard = as_heard(numbers)
        group = self._extended.group
        if heard.rows_differ:
            raise ran.part.unlike_rows() if ran.part else unlike_rows(group, own, whole)
        if heard.program_differs:
            check_programs(group)
        if not group.elastic:
            last_programs.clear()
        if heard.state_differs:
            self._state.check()
        if self._trains:
            keep_build(self._model.optimizer)
            self._extended.progress.add(int(ran.steps), logged=self._is_atomic)
            record.add(int(ran.steps), own, everyone)
            partitioned_step.note_rows(self._model, everyone // max(1, int(ran.steps)))
            step_exchange.grant(step_exchange.wanted if self._is_alone else heard.asked)
        if ran.totals:
            for variable, total in zip(
                metric_state.metric_variables(self._model), ran.totals, strict=True
            ):
                variable.value.know_total(total)


def _no_rows() -> tf.Tensor:
    """Returns the vector of `_Steps.run_one` for the case that no step runs: zeros."""
    return tf.concat([[0, 0, 0], heard_nothing()], axis=0)


def _rows_told(strategy: Any, batch: Any) -> tf.Tensor:
    """Returns the number of rows of the whole batch if the batch contains it, else 0."""
    _, told = without_rows(batch)
    if told is None:
        return tf.constant(0)
    halves = strategy.experimental_local_results(told)[0][::2]
    return tf.reduce_sum(tf.bitwise.left_shift(halves, 15 * tf.range(tf.size(halves))))


class PredictFunction:
    """The step function of `predict`, which maps a list of batches to the outputs for all rows.

    Args:
        model: the model, compiled under a tfdist strategy.
    """

    def __init__(self, model: keras.Model) -> None:
        self._model = model
        self._strategy = model.distribute_strategy
        self._extended = extended_of(self._strategy)
        self._run_one = make_function(model, _PredictStep(model).run)
        self._sizes = _Sizes()
        self._state = StateComparison(model)

    def run(self, batches: list[Any]) -> Any:
        """Returns the outputs for all rows of the batches.

        Raises:
            ProgramMismatchError: the workers have different data, programs or state.
        """
        number = 0
        if self._extended.communicates:
            number = self._state.number(None, len(batches), current_context().call)
        step_exchange.publish(number)
        group = self._extended.group
        with running_step(group, eager=self._model.run_eagerly):
            parts = [_local_part(self._strategy, batch, self._sizes) for batch in batches]
            results = []
            for part in parts:
                with part.compared():
                    results.append(self._run_one(part.shards, part.form))
        for (_, numbers), part in zip(results, parts, strict=True):
            heard = as_heard(numbers.numpy().tolist())
            if heard.rows_differ:
                raise part.unlike_rows()
            if heard.program_differs:
                check_programs(group)
            if heard.state_differs:
                self._state.check()
        if not group.elastic:
            last_programs.clear()
        outputs = [output for output, _ in results]
        if len(outputs) == 1:
            return outputs[0]
        return tf.nest.map_structure(lambda *parts: tf.concat(parts, axis=0), *outputs)


class _PredictStep:
    """Runs a model's `predict_step` on one batch, in a graph or eagerly.

    Args:
        model: the model, compiled under a tfdist strategy.
    """

    def __init__(self, model: keras.Model) -> None:
        self._model, self._strategy = model, model.distribute_strategy

    def run(self, batch: Any, form: BatchForm) -> Any:
        """Returns the outputs and the result of `heard`."""
        alone = not extended_of(self._strategy).communicates
        if tf.executing_eagerly() and not alone:
            batch, told = without_rows(batch)
            return run_eager_prediction(
                self._model, distribute.without_none_components(batch), told, shared=form.shared
            )

        added: Added = []

        def replica_step(shard: Any) -> Any:
            if alone:
                return self._model.predict_step(distribute.without_none_components(shard))
            shard, told = without_rows(shard)
            shard = _as_traced(shard, form.rows, self._strategy)
            return partitioned_step.run_partitioned_prediction(
                self._model, shard, form, added, told
            )

        outputs = self._strategy.run(replica_step, (batch,))
        return (outputs, heard_nothing()) if alone else _of_first(self._strategy, outputs)


def shard_batch(strategy: tf.distribute.Strategy, batch: Any) -> Any:
    """Takes the local replicas' rows of a batch that all workers hold, if it is not yet split."""
    replicas = strategy.num_replicas_in_sync
    flat = [leaf for leaf in tf.nest.flatten(batch) if leaf is not None]
    if not extended_of(strategy).communicates or any(
        isinstance(v, tf.distribute.DistributedValues) for v in flat
    ):
        return batch
    if isinstance(batch, list):
        batch = tuple(batch)
    tensors = distribute.as_tensors(batch)
    fixed = None if extended_of(strategy).group.elastic else replicas

    def shard(context: Any) -> Any:
        return take_share(tensors, context.replica_id_in_sync_group, replicas, fixed)

    return strategy.experimental_distribute_values_from_function(shard)


class _Sizes:
    """Remembers the number of rows of the first batch. Only this number can be static in traces."""

    def __init__(self) -> None:
        self._first: int | None = None

    def known(self, rows: int | None) -> int | None:
        """Returns `rows` if the first batch had the same number of rows, else None."""
        if self._first is None:
            self._first = rows
        return rows if rows == self._first else None

    def forget(self) -> None:
        """Makes the next batch count as the first one. Called if the workers' batches differ."""
        self._first = None


class _LocalPart(NamedTuple):
    """The local replicas' part of a batch.

    Attributes:
        strategy: the strategy.
        shards: the rows of each local replica.
        form: the properties of the batch that the model may depend on.
        sizes: the record of the number of rows of the first batch.
        rows: the number of rows of the whole batch if this worker holds the whole batch, else 0.
    """

    strategy: Any
    shards: Any
    form: BatchForm
    sizes: _Sizes
    rows: int = 0

    @contextlib.contextmanager
    def compared(self) -> Iterator[None]:
        """Makes a step in this context check that the workers' batches have equal numbers of rows.

        Raises:
            ProgramMismatchError: the batches have different numbers of rows.
        """
        step_exchange.publish_rows(self.rows)
        try:
            yield
        except tf.errors.InvalidArgumentError as error:
            if not finds_unlike_shares(error):
                raise
            raise self.unlike_rows() from None

    def unlike_rows(self) -> ProgramMismatchError:
        """Returns the error to raise if the workers' batches differ. All workers must call this."""
        self.sizes.forget()
        own = int(count_local_rows(self.strategy, without_rows(self.shards)[0]))
        whole = self.rows or int(_rows_told(self.strategy, self.shards))
        return unlike_rows(extended_of(self.strategy).group, own, whole)


def _local_part(strategy: Any, batch: Any, sizes: _Sizes) -> _LocalPart:
    if not extended_of(strategy).communicates:
        return _LocalPart(strategy, batch, BatchForm(), sizes)
    shards = shard_batch(strategy, batch)
    given = shards is not batch
    form = distribute.form_of(batch) if given else current_context().next_form
    # In an elastic job, the number of rows is never static, because it often depends on the number
    # of workers.
    known = None if extended_of(strategy).group.elastic else sizes.known(form.rows)
    rows = int(count_rows(partitioned_step.divided(batch, form))) if given else 0
    return _LocalPart(strategy, shards, form._replace(rows=known, given=given), sizes, rows)


def _as_traced(shard: Any, rows: int | None, strategy: Any) -> Any:
    """Returns a replica's rows. Their number is static only if it is the same on all replicas."""
    shard = distribute.without_none_components(shard)
    extended = extended_of(strategy)
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
