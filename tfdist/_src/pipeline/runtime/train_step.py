"""Runs training, evaluation and prediction steps, from reading a batch to returning the logs."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist._src.data.call_context import current_context
from tfdist._src.data.shares import share_of_rows, take_share
from tfdist._src.global_view.resharding import RowShare
from tfdist._src.global_view.transfer import Transfer
from tfdist._src.internals.keras import loss_tracker_of
from tfdist._src.keras.fit import atomic_step
from tfdist._src.keras.fit.atomic_step import AtomicStep
from tfdist._src.keras.fit.compared_state import StageComparison
from tfdist._src.keras.fit.metric_state import metric_variables, totals_of
from tfdist._src.keras.fit.partitioned_step import ReplicaCommunication, note_step
from tfdist._src.keras.fit.step_exchange import Request, step_exchange
from tfdist._src.keras.optimizers.gradient_sync import DeferralTrial, update_late
from tfdist._src.monitoring.training import record
from tfdist._src.pipeline.placement.strategy import HybridStrategy
from tfdist._src.pipeline.runtime.channels import propagating_errors
from tfdist._src.pipeline.runtime.engine import Engine, agree_on_program, agree_on_update
from tfdist._src.pipeline.runtime.input import Batch, State, agree_on_batch, next_batch, spec_of
from tfdist._src.pipeline.runtime.logs import (
    Recorded,
    collect_layer_results,
    mean_loss,
    share_logs,
    sum_over_pipelines,
)
from tfdist._src.pipeline.runtime.microbatch_executor import Feed, MicrobatchExecutor
from tfdist._src.pipeline.runtime.outputs import Outputs
from tfdist._src.pipeline.runtime.step_context import PipelineStep, loss_scale, prepare_update
from tfdist._src.strategy.extended import extended_of


class StepRunner:
    """Runs the steps of a model on this rank.

    Args:
        model: the PipelineModel.
        engine: the engine that builds the model's programs.
        strategy: the model's strategy.

    Attributes:
        generation: the generation of the group for which this object was made. When workers join
            or leave, the group gets a new generation, and a new `StepRunner` is needed.
        logs: the logs of the last step.
    """

    def __init__(self, model: Any, engine: Engine, strategy: HybridStrategy) -> None:
        self._model = model
        self._engine = engine
        self._strategy = strategy
        self._functions: dict[Any, Any] = {}
        self._timed = False
        self.generation = extended_of(strategy).group.generation
        self._layer_results = collect_layer_results(model.partition, strategy)
        self.logs: dict[str, Any] = {}
        self._compared = StageComparison(model)
        self._microbatches = 0
        self._times: Any = None

    def run(self, mode: str, iterator: Iterator[Any]) -> dict[str, Any]:
        """Runs a training or evaluation step.

        Args:
            mode: `"train"` or `"test"`.
            iterator: yields global batches.

        Returns:
            The logs, which are equal on all ranks.

        Raises:
            StopIteration: the dataset is exhausted.
        """
        with propagating_errors(self._strategy):
            engine = self._engine
            is_fit = mode == "train" and isinstance(iterator, tf.distribute.DistributedIterator)
            state = self._state(current_context().training_call if is_fit else None)
            batch = next_batch(self._strategy, iterator, engine.reads, engine.check_inputs, state)
        atomic = mode == "train" and atomic_step.applies(self._strategy)
        progress = extended_of(self._strategy).progress
        with progress.undoing() if atomic else contextlib.nullcontext():
            logs, totals, times = self._call(mode, batch, atomic=atomic)
        if totals:
            for variable, total in zip(metric_variables(self._model), totals, strict=True):
                variable.value.know_total(total)
        self.logs = dict(logs)
        self._times = times
        if mode == "train":
            progress.add(1, logged=atomic)
            rows = batch.rows.numpy().tolist()
            own = rows[extended_of(self._strategy).worker_rank] if engine.holds_last else 0
            record.add(1, own, sum(rows))
            step_exchange.grant(batch.asked or Request(0))
        return self.logs

    @contextlib.contextmanager
    def timing(self) -> Iterator[Callable[[], Recorded]]:
        """Records the times of the actions in every step inside this context.

        Yields:
            A function that returns the times recorded in the last step on this rank.
        """
        self._timed = True
        try:
            yield lambda: Recorded(self._microbatches, self._times.numpy())
        finally:
            self._timed = False

    def forget(self, mode: str) -> None:
        """Discards the functions of a mode, so that the next step builds new ones.

        All ranks must call this method together, since they build the functions together.

        Args:
            mode: `"train"`, `"test"` or `"predict"`.
        """
        self._functions = {key: f for key, f in self._functions.items() if key[0] != mode}

    def predict(self, data: Any) -> Any:
        """Returns the model's outputs for a global batch, on all ranks."""
        with propagating_errors(self._strategy):
            batch = agree_on_batch(
                self._strategy, data, self._engine.check_inputs, self._state(None)
            )
        return self._call("predict", dataclasses.replace(batch, targets=(None, None)))

    def _state(self, call: Any) -> State:
        return State(*self._compared.numbers(call, steps=1), self._compared.check)

    def _call(self, mode: str, batch: Batch, *, atomic: bool = False) -> Any:
        x, targets, all_rows = batch.x, batch.targets, batch.rows
        microbatches = self._microbatches_for(all_rows.numpy().tolist())
        self._microbatches = microbatches
        x, targets = self._with_rows_of_others((x, targets), all_rows.numpy().tolist())
        specs = keras.tree.map_structure(spec_of, targets)
        elastic = atomic and extended_of(self._strategy).group.elastic
        key = (mode, microbatches, batch.spec_hash, self._timed, atomic, elastic)
        if key not in self._functions:
            # The specs leave the number of rows open. Otherwise, the first batch with fewer rows
            # would cause a retrace.
            x_specs = keras.tree.map_structure(spec_of, x)
            given = x_specs, specs, tf.TensorSpec.from_tensor(all_rows)
            total = sum(all_rows.numpy().tolist())
            self._functions[key] = self._make(mode, microbatches, given, total, atomic=atomic)
            if mode == "train":
                note_step(self._model, self._engine.transfers(total), total)
        with propagating_errors(self._strategy):
            return self._functions[key](x, targets, all_rows)

    def _with_rows_of_others(self, data: Any, all_rows: list[int]) -> Any:
        """Replaces the data of a replica that has no rows in this batch.

        The replica gets a row from another replica, and computes with a copy of this row in each
        microbatch. This is necessary since many kernels do not accept empty tensors. The results
        for these rows are not used.
        """
        if all(all_rows) or not any(all_rows):
            return data
        extended = extended_of(self._strategy)
        own = all_rows[extended.worker_rank]
        leads = own > 0 and not any(all_rows[: extended.worker_rank])

        def fill(leaf: Any) -> Any:
            if leaf is None or not leaf.shape.rank:
                return leaf
            row = extended.gather_rows([leaf[: int(leads)]])
            return leaf if own else tf.repeat(row, self._microbatches, axis=0)

        return keras.tree.map_structure(fill, data)

    def explain(self, data: Any) -> list[Transfer]:
        """Returns the transfers of a training step; all ranks must call it together.

        Args:
            data: a global batch.
        """
        with propagating_errors(self._strategy):
            batch = agree_on_batch(
                self._strategy, data, self._engine.check_inputs, self._state(None)
            )
            targets = keras.tree.map_structure(spec_of, batch.targets)
            rows = batch.rows.numpy().tolist()
            self._program("train", self._microbatches_for(rows), targets, sum(rows))
        return self._engine.transfers(sum(rows))

    def _microbatches_for(self, all_rows: Sequence[int]) -> int:
        # There must not be more microbatches than rows on any replica that has rows. Otherwise, a
        # microbatch would be empty, and means over its rows would be NaN.
        fewest = min((rows for rows in all_rows if rows > 0), default=1)
        return int(min(self._strategy.microbatches, fewest))

    def _program(self, mode: str, microbatches: int, targets: Any, rows: int) -> MicrobatchExecutor:
        group = extended_of(self._strategy).group
        with self._in_replica():
            return agree_on_program(
                self._engine, group, rows, mode, microbatches, targets, timed=self._timed
            )

    def _make(
        self, mode: str, microbatches: int, given: tuple[Any, ...], rows: int, *, atomic: bool
    ) -> Any:
        program = self._program(mode, microbatches, given[1], rows)

        def compiled(trial: DeferralTrial | None = None) -> Any:
            def step(x: Any, targets: Any, all_rows: tf.Tensor) -> Any:
                with self._in_replica():
                    return self._step(mode, microbatches, program, x, targets, all_rows, trial)

            step = self._engine.compiled(step)
            return tf.function(step, autograph=False, reduce_retracing=True)

        with propagating_errors(self._strategy):
            if atomic:
                group = extended_of(self._strategy).group
                scratch, confirm = self._engine.scratch, self._confirm if group.elastic else None
                step = AtomicStep(self._model, compiled, scratch, confirm)
                can = step.trace_and_check_deferral
                if not agree_on_update(group, lambda: can(*given)):
                    step.update_in_place()
                function = tf.function(step.__call__, autograph=False, reduce_retracing=True)
            else:
                function = compiled()
            function.get_concrete_function(*given)
        return function

    def _confirm(self) -> tf.Tensor:
        # Before any worker commits the step, all workers confirm that they have written its
        # results. Then a worker that fails here can redo the step. This is necessary if there is no
        # other pipeline, since no other worker has the state of the worker's stages.
        return extended_of(self._strategy).group.native().all_reduce([tf.constant(1.0)])[0]

    @contextlib.contextmanager
    def _in_replica(self) -> Iterator[None]:
        extended = extended_of(self._strategy)
        with (
            self._strategy.scope(),
            tf.distribute.ReplicaContext(self._strategy, extended.worker_rank),
            tf.device(extended.worker_devices[0]),
        ):
            yield

    def _step(
        self,
        mode: str,
        microbatches: int,
        program: MicrobatchExecutor,
        x: Any,
        targets: Any,
        all_rows: tf.Tensor,
        trial: DeferralTrial | None,
    ) -> Any:
        rank = extended_of(self._strategy).worker_rank
        rows, total = all_rows[rank], tf.reduce_sum(all_rows)
        inputs = {} if x is None else self._engine.inputs(x)
        scale = tf.constant(1.0)
        if mode == "train":
            scale = loss_scale(self._model.optimizer, self._strategy, self._engine)
        with PipelineStep(rows, self._strategy, self._engine) as step:
            feed = self._feed(mode, microbatches, inputs, targets, all_rows, scale)
            if mode == "train":
                self._engine.shared_variables.save_states()
                self._engine.sums.begin(
                    v for s in program.stages.values() for v in s.dense_variables
                )
            before = [tf.convert_to_tensor(v) for v in metric_variables(self._model)]
            outcome = program.run(feed)
            if mode == "predict":
                return self._predictions(feed.outputs, microbatches, rows)
            if extended_of(self._strategy).communicates:
                self._forget_without_rows(before, rows)
            loss = mean_loss(self._strategy, outcome, rows, total)
            statistics = [v for s in program.stages.values() for v in s.written]
            if mode != "train":
                return *self._logs(mode, loss, rows, total, statistics), outcome.spans
            update = prepare_update(self._model, self._strategy, self._engine, step)
            if trial is None:
                update.apply()
                return *self._logs(mode, loss, rows, total, statistics), outcome.spans
            step.late_in, step.late = tf.compat.v1.get_default_graph(), update
            results = *self._logs(mode, loss, rows, total, statistics), outcome.spans
            update.communicated += [*outcome.sends, *outcome.last, *tf.nest.flatten(results)]
            update_late(step, trial)
            return results

    def _feed(
        self,
        mode: str,
        microbatches: int,
        inputs: dict[int, Any],
        targets: Any,
        all_rows: tf.Tensor,
        scale: tf.Tensor,
    ) -> Feed:
        share = self._share(all_rows, microbatches)
        bounds = [share_of_rows(share.rows, m, microbatches) for m in range(microbatches)]

        def position(m: int) -> Sequence[tf.Tensor]:
            start, stop = bounds[m]
            first = tf.minimum(share.first + start, share.total - 1)
            return [stop - start, share.total, first]

        return Feed(
            rows=lambda m: bounds[m][1] - bounds[m][0],
            inputs=lambda m: take_share(inputs, m, microbatches, microbatches),
            position=position,
            seed=scale,
            outputs=self._outputs_of(mode, microbatches, inputs, targets, share, scale),
        )

    def _share(self, all_rows: tf.Tensor, microbatches: int) -> RowShare:
        """Returns the rows of the batch with which this replica computes."""
        rank = extended_of(self._strategy).worker_rank
        own, first = all_rows[rank], tf.reduce_sum(all_rows[:rank])
        counts = own > 0
        return RowShare(
            rows=tf.where(counts, own, microbatches),
            total=tf.reduce_sum(all_rows),
            first=first,
            has_rows=counts,
            has_first_row=tf.equal(first, 0) & counts,
            is_first=tf.constant(rank == 0),
        )

    def _outputs_of(
        self,
        mode: str,
        microbatches: int,
        inputs: dict[int, Any],
        targets: Any,
        share: RowShare,
        scale: tf.Tensor,
    ) -> Outputs | None:
        if not self._engine.holds_last:
            return None
        if mode == "predict":
            return Outputs(None, microbatches)
        extended = extended_of(self._strategy)
        return Outputs(
            self._engine.outputs(mode, keras.tree.map_structure(spec_of, targets)),
            microbatches,
            list(inputs.values()),
            targets,
            share,
            ReplicaCommunication(extended) if extended.communicates else _OneReplica(),
            scale,
        )

    def _forget_without_rows(self, before: Sequence[tf.Tensor], rows: tf.Tensor) -> None:
        """Restores the metrics of a replica that has no rows, since their updates may be NaN."""
        variables = metric_variables(self._model)
        # A metric that was built during the step has no value in `before`. It started at zero.
        known = [*before, *(tf.zeros_like(v) for v in variables[len(before) :])]
        for variable, value in zip(variables, known, strict=True):
            variable.assign(tf.where(rows > 0, variable, value))

    def _logs(
        self,
        mode: str,
        loss: tf.Tensor,
        rows: tf.Tensor,
        total: tf.Tensor,
        statistics: Sequence[Any],
    ) -> tuple[Any, Any]:
        loss_tracker_of(self._model).update_state(loss, sample_weight=rows)
        results = self._model.get_metrics_result()
        totals: list[Any] = []
        if extended_of(self._strategy).communicates:
            results, totals = sum_over_pipelines(self._model, statistics, rows, total)
        kept = totals_of(self._model)
        if mode == "train" and kept is not None:
            kept.keep(totals or [tf.convert_to_tensor(v) for v in metric_variables(self._model)])
        return share_logs(self._strategy, results, self._layer_results), totals

    def _predictions(self, made: Outputs | None, microbatches: int, rows: tf.Tensor) -> Any:
        graph = self._model.partition.graph
        if made is not None:
            parts = [[made.values[m][key] for key in graph.outputs] for m in range(microbatches)]
            outputs = [tf.concat(some, axis=0) for some in zip(*parts, strict=True)]
            if extended_of(self._strategy).communicates:
                outputs = [tf.cond(rows > 0, lambda t=t: t, lambda t=t: t[:0]) for t in outputs]
        else:
            specs = self._engine.output_specs
            outputs = [tf.zeros([0, *spec.shape[1:]], spec.dtype) for spec in specs]
        pipeline = self._strategy.pipeline_communicator
        gathered = [pipeline.all_gather(t) for t in outputs]
        if extended_of(self._strategy).communicates:
            gathered = [extended_of(self._strategy).gather_rows([t]) for t in gathered]
        return self._engine.pack_outputs(gathered)


class _OneReplica:
    """Replaces the communication between replicas if there is only one replica."""

    scatters = False

    def reduce(self, tensors: Sequence[tf.Tensor], reductions: Sequence[str]) -> list[tf.Tensor]:
        return list(tensors)

    def gather(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        return list(tensors)

    def scatter(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        return list(tensors)

    def awaits_rows(self, values: Sequence[tf.Tensor]) -> None:
        pass

    def begin(self) -> None:
        pass
