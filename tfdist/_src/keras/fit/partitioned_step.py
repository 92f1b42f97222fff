"""Traces steps for the whole batch and partitions them along its rows.

Keras's `train_step` is traced as in a single process, for a batch with the rows of all replicas.
The package `global_view` then copies the traced graph so that the copy computes only this replica's
rows, and communicates wherever the rows of other replicas are needed. So a step has the same result
as in a single process, regardless of its computations.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist._src.comm import flight_log, tokens
from tfdist._src.data.distribute import as_tensors, form_of
from tfdist._src.data.shares import BatchForm
from tfdist._src.global_view.analysis import Analysis
from tfdist._src.global_view.decision import Value, dims_of
from tfdist._src.global_view.explain import StepFingerprints, transfers
from tfdist._src.global_view.layout import (
    PER_WORKER,
    SHARED,
    WHOLE,
    ZEROED_SUM,
    Dim,
    Layout,
    Symbol,
    rows,
)
from tfdist._src.global_view.partition import Added, Partition, WorkerEmitter
from tfdist._src.global_view.resharding import RowShare
from tfdist._src.global_view.transfer import Transfer, bytes_text, largest_first, report, total
from tfdist._src.internals.extended import copy_here
from tfdist._src.internals.graphs import trace_into_graph
from tfdist._src.internals.optimizer import accumulators, updating_optimizers
from tfdist._src.internals.tensorflow import get_current_replica_id_as_int, tracing_summaries
from tfdist._src.keras.fit import step_exchange
from tfdist._src.keras.fit.compared_state import outer_state_of
from tfdist._src.keras.fit.metric_state import metric_variables
from tfdist._src.keras.optimizers.applying import accumulates_own, optimizers_of
from tfdist._src.keras.optimizers.gradient_sync import DeferralTrial, update_late
from tfdist._src.log import logger
from tfdist._src.sharding import sharded_by, sharded_optimizers
from tfdist._src.strategy.commit_point import find_writes
from tfdist._src.strategy.extended import ReplicatedExtended, extended_of
from tfdist._src.strategy.step import GlobalStep, RowCounts
from tfdist._src.strategy.variables import SummedVariable
from tfdist._src.xla import has_rows

_MAX_SHOWN = 50
_SMALL = 64 << 10

# Maps the name of a model, if its latest trace has not run yet, to a function that records the
# trace once the number of rows is known.
_pending: dict[str, Callable[[int], None]] = {}
_hinted: set[str] = set()


def note_trace(model: keras.Model, analysis: Analysis, rows: int | None) -> None:
    """Records what a newly traced training step communicates. Never fails.

    Args:
        model: the model.
        analysis: the analysis of the step's graph.
        rows: the number of rows of the whole batch. If it is None, `note_rows` must be called after
            the first step.
    """
    if get_current_replica_id_as_int():
        return  # All replicas of a process have the same trace.
    name, extended = model.name, extended_of(model.distribute_strategy)
    program = ""

    def note(count: int | None) -> None:
        nonlocal program
        # In an elastic job, the number of replicas may change after the trace, so it counts as
        # unknown.
        replicas = None if extended.group.elastic else extended.replica_count
        found = transfers(analysis, count, replicas)
        program = program or _hash_of(found)
        _note(model, found, count, program)

    _pending.pop(name, None)
    with contextlib.suppress(Exception):  # A failure here must not stop the training.
        note(rows)
    if rows is None:
        _pending[name] = note


def note_rows(model: keras.Model, rows: int) -> None:
    """Completes the record of `note_trace` once the number of rows is known. Never fails.

    Args:
        model: the model.
        rows: the number of rows of the whole batch.
    """
    note = _pending.pop(model.name, None) if _pending else None
    if note is not None:
        with contextlib.suppress(Exception):
            note(rows)


def note_step(model: keras.Model, found: Sequence[Transfer], rows: int) -> None:
    """Records the values that a training step communicates. Never fails.

    Args:
        model: the model.
        found: the values that the step communicates.
        rows: the number of rows of the whole batch.
    """
    with contextlib.suppress(Exception):
        _note(model, found, rows, _hash_of(found))


def _note(model: keras.Model, found: Sequence[Transfer], rows: int | None, program: str) -> None:
    flight_log.note_step(model.name, _described(found, rows, program))
    if rows is not None and extended_of(model.distribute_strategy).group.topology.is_chief:
        _hint(model.name, found, rows)


def _hash_of(found: Sequence[Transfer]) -> str:
    """Hashes communicated values without names, so that equal programs have equal hashes."""
    values = [(one.kind, one.operation, one.shape, one.reason) for one in found]
    return hashlib.sha256(repr(values).encode()).hexdigest()[:16]


def _described(found: Sequence[Transfer], rows: int | None, program: str) -> dict[str, Any]:
    """Returns the entry of a step in the flight log."""
    shown = largest_first(found)[:_MAX_SHOWN]
    return {
        "program": program,
        "rows": rows,
        "reduced_bytes": total(found, "reduce"),
        "gathered_bytes": total(found, "gather"),
        "sent_bytes": total(found, "send"),
        "unknown": sum(one.size is None for one in found),
        "transfers": [
            {
                "kind": one.kind,
                "operation": one.operation,
                "bytes": one.size,
                "shape": one.shape,
                "where": one.where,
                "reason": one.reason,
            }
            for one in shown
        ],
        "more": len(found) - len(shown),
    }


def _hint(name: str, found: Sequence[Transfer], rows: int) -> None:
    """Warns once per model if a step gathers more bytes than it reduces.

    Small gathered values do not count.
    """
    sizes = [(one.estimate(rows), one) for one in found]
    reduced = sum(size for size, one in sizes if one.kind == "reduce" or one.replaces_reduction)
    gathers = [
        (size, one)
        for size, one in sizes
        if size >= _SMALL and one.kind == "gather" and not one.replaces_reduction
    ]
    gathered = sum(size for size, _ in gathers)
    if gathered <= reduced or name in _hinted:
        return
    _hinted.add(name)
    size, largest = max(gathers, key=lambda pair: pair[0])
    reason = f" ({largest.reason})" if largest.reason else ""
    logger.warning(
        f"A training step of {name!r} gathers {bytes_text(gathered)}, more than the "
        f"{bytes_text(reduced)} that it reduces. The largest value has {bytes_text(size)}, for "
        f"{largest.operation} at {largest.where}{reason}. `strategy.explain(model, batch)` prints "
        "all of them, and how to gather less."
    )


def run_partitioned_step(
    model: keras.Model,
    step_function: Callable[[Any], Any],
    batch: Any,
    form: BatchForm,
    added: Added,
    told: tf.Tensor | None = None,
    *,
    late: DeferralTrial | None = None,
) -> tuple[Any, Any, Any]:
    """Adds `train_step` or `test_step` to the current graph, partitioned for this replica's rows.

    Args:
        model: the model.
        step_function: `model.train_step` or `model.test_step`.
        batch: the replica's rows.
        form: the properties of the whole batch that the traced graph may depend on.
        added: an empty list, which all replicas of the process share. It collects the operations
            that the process adds only once for all its replicas.
        told: the encoded number of rows of the whole batch, if the batch contains it (see
            `WithRows`); else None.
        late: the attempt to defer the optimizer's update to the end of the step; None if the update
            must not be deferred.

    Returns:
        Three results: the logs of the step, which are equal on all replicas; the totals of
        `metric_variables(model)`; and a vector of the number of rows of the whole batch, followed
        by the result of `step_exchange.heard`.
    """

    def program(whole: Any, step: GlobalStep) -> Any:
        if late is not None:
            step.late_in = tf.compat.v1.get_default_graph()
        try:
            logs = tf.nest.map_structure(tf.convert_to_tensor, step_function(whole))
            totals = [tf.convert_to_tensor(v) for v in metric_variables(model)]
        except Exception:
            if late is not None:
                late.fails |= step.late is not None
            raise
        update_late(step, late)
        return logs, totals

    traced = step_exchange.TracedProgram()
    batch, counted = _counted(model, batch, form, traced, told)
    trains = step_function == model.train_step
    logs, totals = _run(model, program, batch, counted, form, added, traced, trains=trains)
    return logs, totals, tf.concat([[counted.total], counted.heard], axis=0)


def run_partitioned_prediction(
    model: keras.Model,
    batch: Any,
    form: BatchForm,
    added: Added,
    told: tf.Tensor | None = None,
) -> Any:
    """Adds `predict_step` to the current graph, partitioned for this replica's rows.

    Args:
        model: the model.
        batch: the replica's rows.
        form: as for `run_partitioned_step`.
        added: as for `run_partitioned_step`.
        told: as for `run_partitioned_step`.

    Returns:
        The outputs for the rows of all replicas, and the result of `step_exchange.heard`.
    """
    traced = step_exchange.TracedProgram()
    batch, counted = _counted(model, batch, form, traced, told)

    def program(whole: Any, step: GlobalStep) -> Any:
        return model.predict_step(whole)

    return _run(model, program, batch, counted, form, added, traced), counted.heard


def _counted(
    model: keras.Model,
    batch: Any,
    form: BatchForm,
    program: step_exchange.TracedProgram,
    told: tf.Tensor | None,
) -> tuple[Any, RowCounts]:
    """Exchanges the row counts of all replicas. Returns this replica's rows and the row counts."""
    # In an elastic job, a worker that joins in the middle of an epoch has no batch of this epoch,
    # so its row count may differ from its share of the whole batch.
    shared = form.shared and not extended_of(model.distribute_strategy).group.elastic
    rows = divided(batch, form)
    counted = step_exchange.exchange_rows(
        rows, program, shared=shared, awaited=form.given, told=told
    )
    return step_exchange.once_compared(batch, counted) if form.given else batch, counted


def _is_first(extended: ReplicatedExtended) -> tf.Tensor:
    replica, _ = extended.place_here()
    return tf.equal(replica, 0)


def _run(
    model: keras.Model,
    program: Callable[[Any, GlobalStep], Any],
    batch: Any,
    counted: RowCounts,
    form: BatchForm,
    added: Added,
    program_told: step_exchange.TracedProgram,
    *,
    trains: bool = False,
) -> Any:
    """Traces a program for the whole batch, and adds the part that computes this replica's rows."""
    extended = extended_of(model.distribute_strategy)
    batch = _with_a_row_of_others(extended, batch, counted, form)
    leaves = tf.nest.flatten(batch)
    # Each replica needs all rows of ragged and sparse tensors, and of the components in
    # `form.whole`.
    for i, leaf in enumerate(leaves):
        if isinstance(leaf, tf.RaggedTensor) or i in form.whole:
            leaves[i] = extended.gather_over_replicas(leaf)
        elif isinstance(leaf, tf.SparseTensor):
            gather = extended.gather_over_replicas
            leaves[i] = step_exchange.gather_sparse(leaf, counted.first_row, counted.total, gather)
        elif form.rows == 1 and isinstance(leaf, tf.Tensor) and leaf.shape.rank:
            # If the whole batch has a single row, the program may broadcast it, so every replica
            # computes this row.
            leaf.set_shape([1, *leaf.shape[1:]])
    traced = _trace(model, program, tf.nest.pack_sequence_as(batch, leaves), form)
    if trains:
        note_trace(model, traced.analysis, form.rows)
    share = _share(extended, counted, form.rows)
    communication = ReplicaCommunication(extended, counted.counts)
    leads = get_current_replica_id_as_int() == 0
    several = len(extended.worker_devices) > 1
    emitter = WorkerEmitter(share, communication, added if several else None, leads=leads)
    given = [*_components(leaves), *traced.captured]
    partition = Partition(traced.analysis, emitter)
    outputs = partition.add(given, [WHOLE] * len(traced.analysis.outputs))
    elastic = extended.group.elastic
    if not elastic and extended.worker_count > 1:
        analysis = traced.analysis
        # `_own_resources` does not include the state of compressors and sharded optimizers.
        own_state = _own_resources(extended) | layouts_of_variables(model, extended).keys()
        outer_state_of(model).note(analysis.graph, analysis.results, own_state)
    if elastic or extended.worker_count > 1:
        # If the model has few weights, some workers have no shard of an optimizer's state, so that
        # their steps do not contain its update.
        optimizers = optimizers_of(model).values() if trains else ()
        states = [sharded_by(one) for outer in optimizers for one in updating_optimizers(outer)]
        has_shards = [bool(state.shards) for state in states if state is not None]
        _tell(extended, program_told, traced, emitter, (form, trains, has_shards))
    return traced.packed(outputs)


def _tell(
    extended: ReplicatedExtended,
    program: step_exchange.TracedProgram,
    traced: _Traced,
    emitter: WorkerEmitter,
    traced_for: Any,
) -> None:
    """Makes the step exchange a fingerprint of its program, to detect differences between workers.

    Args:
        extended: the `extended` object of the strategy.
        program: receives the fingerprint. The step then sends it each time it runs.
        traced: the traced program.
        emitter: the emitter that has added the program to the step's graph.
        traced_for: the conditions under which the step was traced, apart from the shapes and types
            of its inputs.
    """
    graph = traced.analysis.graph
    order = {
        id(copy.handle): number
        for number, variable in enumerate(extended.variables)
        for copy in getattr(variable, "values", [variable])
    }
    captures = [(order.get(id(outer), -1), inner) for outer, inner in graph.captures]
    ours = [inner for number, inner in sorted(captures, key=lambda c: c[0]) if number >= 0]
    others = [inner for number, inner in captures if number < 0]
    captured = {
        inner.op.name: f"{kind} {number} {inner.dtype.name}"
        for kind, inners in (("variable", ours), ("captured", others))
        for number, inner in enumerate(inners)
    }
    # The sums of compressed gradients and of sharded updates may be split differently on each
    # worker, so they are not compared.
    compresses = extended.compressor is not None and extended.compressor.active
    same = not compresses and not extended.shards_optimizers
    communicated = [one for one in emitter.communicated if same or isinstance(one[1], tf.Tensor)]
    try:
        found = StepFingerprints(
            communicated, graph, traced.analysis.results, captured, updates=same
        )
    except ValueError:  # The graph is too large for a protobuf message.
        return
    shapes = [(str(t.shape), t.dtype.name) for t in graph.inputs[: -len(graph.captures) or None]]
    program.note(repr((shapes, same, *traced_for)), found)


def divided(batch: Any, form: BatchForm) -> Any:
    """Returns the batch, with None in place of the components that every replica uses in full."""
    leaves = tf.nest.flatten(batch)
    parts = [None if i in form.whole else leaf for i, leaf in enumerate(leaves)]
    return tf.nest.pack_sequence_as(batch, parts)


def _with_a_row_of_others(
    extended: ReplicatedExtended, batch: Any, counted: RowCounts, form: BatchForm
) -> Any:
    """Returns the replica's batch, or the first row of the whole batch if the replica has no rows.

    The row of another replica is needed because many TensorFlow kernels reject empty batches.
    Made-up values might be invalid inputs of the model. The row does not count in the results.
    """
    leaves = tf.nest.flatten(batch)
    dense = [
        i
        for i, leaf in enumerate(leaves)
        if isinstance(leaf, tf.Tensor) and leaf.shape.rank != 0 and i not in form.whole
    ]
    if tf.get_static_value(counted.rows) or not dense:
        return batch
    leads = tf.equal(counted.first_row, 0) & (counted.rows > 0)

    def first_rows() -> list[tf.Tensor]:
        count = tf.where(leads, 1, 0)
        return [extended.gather_over_replicas(leaves[i][:count]) for i in dense]

    shared = tf.cond(counted.some_are_empty, first_rows, lambda: [leaves[i][:0] for i in dense])
    chosen = tf.cond(
        has_rows(counted.rows), lambda: [leaves[i] for i in dense], lambda: list(shared)
    )
    for i, value in zip(dense, chosen, strict=True):
        if leaves[i].shape.rank is not None:
            value.set_shape([None, *leaves[i].shape[1:]])
        leaves[i] = value
    return tf.nest.pack_sequence_as(batch, leaves)


@dataclasses.dataclass
class _Traced:
    """A program that has been traced for the whole batch.

    Attributes:
        analysis: the traced graph with the layouts of its values.
        captured: the values that the graph captures. They are its inputs after the components of
            the batch.
        result: the structure that the program has returned, with tensors of the traced graph.
    """

    analysis: Analysis
    captured: list[Any]
    result: Any

    def packed(self, outputs: Sequence[tf.Tensor]) -> Any:
        """Returns the result of the program, with the graph's tensors replaced by `outputs`."""
        parts = tf.nest.flatten(self.result, expand_composites=True)
        values = iter(outputs)
        parts = [next(values) if _is_output(part) else part for part in parts]
        return tf.nest.pack_sequence_as(self.result, parts, expand_composites=True)


def _is_output(part: Any) -> bool:
    return tf.is_tensor(part) or isinstance(part, tf.Variable)


def _components(leaves: Sequence[Any]) -> list[Any]:
    """Returns the tensors that make up the components of a batch."""
    present = [leaf for leaf in leaves if leaf is not None]
    return [t for leaf in present for t in tf.nest.flatten(leaf, expand_composites=True)]


# At most this number of replicas combine batch statistics by a gather. With more replicas, two sums
# send fewer bytes.
_MAX_GATHERED = 16


def _trace(
    model: keras.Model, program: Callable[[Any, GlobalStep], Any], batch: Any, form: BatchForm
) -> _Traced:
    """Traces a program for the whole batch.

    Args:
        model: the model.
        program: a function of the batch and the step.
        batch: a batch with any number of rows. Its ragged and sparse tensors must already have the
            rows of all replicas.
        form: as for `run_partitioned_step`. If the whole batch has a single row, all replicas have
            this row.
    """
    extended = extended_of(model.distribute_strategy)
    leaves = tf.nest.flatten(batch)
    apart = [i in form.whole for i in range(len(leaves))]
    specs = [
        None if leaf is None else _whole_spec(leaf, None if is_apart else form.rows)
        for leaf, is_apart in zip(leaves, apart, strict=True)
    ]
    made: list[Any] = []

    def traced(*flat: Any) -> Any:
        elastic = extended.group.elastic
        step = GlobalStep(
            form.rows,
            own_statistics=extended.batch_statistics == "replica",
            gathers_statistics=elastic or extended.replica_count <= _MAX_GATHERED,
        )
        with step, tracing_summaries():
            made.append(program(tf.nest.pack_sequence_as(batch, list(flat)), step))
        parts = tf.nest.flatten(made[0], expand_composites=True)
        return [tf.convert_to_tensor(part) for part in parts if _is_output(part)]

    graph = trace_into_graph("global_step", traced, tuple(specs))
    symbol = Symbol(size=form.rows)
    components = [
        isinstance(leaf, tf.Tensor) and not is_apart
        for leaf, is_apart in zip(leaves, apart, strict=True)
        for _ in _components([leaf])
    ]
    values = []
    for placeholder, is_dense in zip(graph.inputs, components, strict=False):
        dims = dims_of(placeholder)
        if is_dense and dims != ():
            known = None if dims is None else (Dim(1, (symbol,)), *dims[1:])
            values.append(Value(WHOLE if form.rows == 1 else rows(), known))
        else:
            values.append(Value(WHOLE, dims))
    layouts = layouts_of_variables(model, extended)
    if len(extended.worker_devices) > 1:
        layouts = {**_shared(graph, extended), **layouts}
    outer = {id(inner): outer for outer, inner in graph.captures}
    captured = [outer[id(placeholder)] for placeholder in graph.inputs[len(components) :]]
    for value, placeholder in zip(captured, graph.inputs[len(components) :], strict=True):
        values.append(Value(layouts.get(id(value), WHOLE), dims_of(placeholder)))
    return _Traced(Analysis(graph, values, symbol), captured, made[0])


def explain(model: keras.Model, batch: Any) -> list[Transfer]:
    """Prints which values a training step communicates, and which lines of code cause this.

    Args:
        model: a built and compiled model that was created under a tfdist strategy.
        batch: a global batch as passed to `train_step`, such as a pair of inputs and targets.

    Returns:
        The values that the workers communicate. The row counts, which every step exchanges, are not
        included.
    """
    batch = as_tensors(batch)
    found: list[list[Transfer]] = []

    def program(whole: Any, step: GlobalStep) -> Any:
        logs = tf.nest.map_structure(tf.convert_to_tensor, model.train_step(whole))
        return logs, [tf.convert_to_tensor(v) for v in metric_variables(model)]

    def replica_step() -> None:
        form = BatchForm(None, form_of(batch).whole)
        count = next(t.shape[0] for t in tf.nest.flatten(divided(batch, form)) if t is not None)
        analysis = _trace(model, program, batch, form).analysis
        extended = extended_of(model.distribute_strategy)
        found.append(transfers(analysis, count, extended.replica_count))

    strategy = model.distribute_strategy
    tf.function(lambda: strategy.run(replica_step), autograph=False).get_concrete_function()
    print(report(found[-1]))
    return found[-1]


def _whole_spec(leaf: Any, static: int | None) -> Any:
    if not isinstance(leaf, tf.Tensor):
        return tf.type_spec_from_value(leaf)
    if leaf.shape.rank is None:
        return tf.TensorSpec(None, leaf.dtype)
    return tf.TensorSpec([static, *leaf.shape[1:]] if leaf.shape.rank else [], leaf.dtype)


def layouts_of_variables(model: keras.Model, extended: ReplicatedExtended) -> dict[int, Layout]:
    """Returns the layouts of variables that differ between replicas, by `id`s of their handles."""
    found: dict[int, Layout] = {}

    def note(variables: Sequence[Any], layout: Layout) -> None:
        for variable in variables:
            value = getattr(variable, "value", variable)
            value = variable if callable(value) else value
            copy = copy_here(value) if hasattr(value, "values") else value
            found[id(copy.handle)] = layout

    summed = [
        v
        for v in extended.variables
        if isinstance(v, SummedVariable) and v.aggregation == tf.VariableAggregation.SUM
    ]
    note(summed, ZEROED_SUM)
    for outermost in optimizers_of(model).values():
        if accumulates_own(outermost, extended):
            for optimizer in updating_optimizers(outermost):
                note(accumulators(optimizer), ZEROED_SUM)
    for optimizer in sharded_optimizers():
        sharded = sharded_by(optimizer)
        if sharded is not None:
            note([v for v in optimizer.variables if len(v.shape)], PER_WORKER)
            note(sharded.shards, PER_WORKER)
            note([] if sharded.copies is None else sharded.copies.variables, PER_WORKER)
    if extended.compressor is not None:
        note(extended.compressor.variables, PER_WORKER)
    return found


def _shared(graph: Any, extended: ReplicatedExtended) -> dict[int, Layout]:
    """Returns a layout for the resources that a graph writes and all local replicas share.

    These resources are variables and tables that were created outside of the strategy's scope.
    Without this layout, each replica would write them, instead of only one replica per process.
    """
    own = _own_resources(extended)
    captured = {
        inner.op.name: id(outer)
        for outer, inner in graph.captures
        if outer.dtype == tf.resource and id(outer) not in own and not tokens.is_token(outer)
    }
    if not captured:
        return {}
    # `kept` contains all written resources here: with several devices, no update is deferred, so
    # nothing is written after a commit point.
    written = find_writes(graph.as_graph_def()).kept
    return {resource: SHARED for name, resource in captured.items() if name in written}


def _own_resources(extended: ReplicatedExtended) -> set[int]:
    """Returns the `id`s of the resource handles of a strategy's variables."""
    return {
        id(copy.handle)
        for variable in extended.variables
        for copy in getattr(variable, "values", [variable])
    }


def _share(extended: ReplicatedExtended, counted: RowCounts, known_rows: int | None) -> RowShare:
    replicas = None if extended.group.elastic else extended.replica_count
    all_have = known_rows is not None and replicas is not None and known_rows >= replicas
    counts = None if all_have else has_rows(counted.rows)
    leads = tf.equal(counted.first_row, 0)
    return RowShare(
        rows=counted.rows if counts is None else tf.maximum(counted.rows, 1),
        total=counted.total,
        first=counted.first_row
        if counts is None
        else tf.minimum(counted.first_row, counted.total - 1),
        has_rows=counts,
        has_first_row=leads if counts is None else leads & counts,
        is_first=_is_first(extended),
    )


class ReplicaCommunication:
    """Combines values across the replicas of a strategy.

    Args:
        extended: the `extended` object of the strategy.
        counts: the number of rows of each replica, which `scatter` needs; None if `scatter` cannot
            be used. The number may be 0 although such a replica computes with a row of another
            replica.
    """

    def __init__(self, extended: ReplicatedExtended, counts: tf.Tensor | None = None) -> None:
        self._extended, self._counts = extended, counts

    def reduce(self, tensors: Sequence[tf.Tensor], reductions: Sequence[str]) -> list[tf.Tensor]:
        results = list(tensors)
        extended = self._extended
        stacked = [i for i, how in enumerate(reductions) if how == "stack"]
        if extended.group.elastic:
            for i in stacked:
                results[i] = self._gather(tensors[i])
        else:  # It is faster to sum them with the other values.
            place, replicas = extended.place_here()[0], extended.replica_count
            for i in stacked:
                results[i] = _placed(tensors[i], place, replicas)
            reductions = ["sum" if how == "stack" else how for how in reductions]
        sums = [i for i, how in enumerate(reductions) if how == "sum"]
        others = [i for i, how in enumerate(reductions) if how not in ("sum", "stack")]
        if sums:
            totals = extended.sum_over_replicas([results[i] for i in sums], "metrics")
            for i, total in zip(sums, totals, strict=True):
                results[i] = total
        for i in others:
            everyone = self._gather(tensors[i][tf.newaxis])
            results[i] = _REDUCTIONS[reductions[i]](everyone, axis=0)
        return results

    def gather(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        return [self._gather(tensor) for tensor in tensors]

    def awaits_rows(self, values: Sequence[tf.Tensor]) -> None:
        self._extended.note_stall(values)

    @property
    def scatters(self) -> bool:
        return self._counts is not None

    def scatter(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        return [self._extended.scatter_over_replicas(t, self._counts) for t in tensors]

    def _gather(self, tensor: tf.Tensor) -> tf.Tensor:
        gathered: tf.Tensor = self._extended.gather_over_replicas(tensor)
        return gathered

    def begin(self) -> None:
        self._extended.await_other_replicas()


def _placed(part: tf.Tensor, place: Any, count: int) -> tf.Tensor:
    """Returns a tensor with `count` elements along the first axis: `part` at `place`, and zeros."""
    is_here = tf.equal(tf.range(count), place)
    shape = [count] + [1] * (part.shape.rank - 1)
    return tf.where(tf.reshape(is_here, shape), part, tf.zeros([], part.dtype))


_REDUCTIONS: dict[str, Callable[..., tf.Tensor]] = {
    "max": tf.reduce_max,
    "min": tf.reduce_min,
    "product": tf.reduce_prod,
    "all": tf.reduce_all,
    "any": tf.reduce_any,
}
