"""Computes the loss with its gradients, or the metrics, from a model's outputs.

The program is traced for all rows of the batch and partitioned like the step of a model without
stages. If the program treats rows independently, each microbatch computes its part as soon as its
outputs are available. Otherwise the program runs once, on the outputs of all microbatches.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfdist._src.global_view.analysis import Analysis, ancestors
from tfdist._src.global_view.decision import Value, dims_of
from tfdist._src.global_view.explain import Transfer, transfers, where
from tfdist._src.global_view.layout import WHOLE, Dim, Layout, Symbol, rows
from tfdist._src.global_view.partition import Partition, WorkerEmitter
from tfdist._src.global_view.resharding import RowShare
from tfdist._src.internals.graphs import trace_into_graph
from tfdist._src.pipeline.stages.trace import NoCommunication, writes
from tfdist._src.pipeline.stages.value_specs import ValueSpec
from tfdist._src.strategy.step import GlobalStep
from tfdist._src.xla import compiled_between_collectives


class OutputProgram:
    """A program on a model's outputs and the targets, for all rows of a batch.

    Args:
        name: shown in profiles.
        program: takes a tensor for each of `outputs`, `masks` and `targets`; returns the results,
            each with the layout that a worker needs.
        outputs: the specs of the model's outputs.
        masks: the specs of their masks.
        targets: the specs of the targets and sample weights, for any number of rows.
        others: the specs of further arguments, independent of the rows.
        known_masks: whether the masks of all rows are available before the outputs.
        layouts_of_variables: returns the layouts of variables, by the ids of their resources.
        jit: whether XLA compiles the program.

    Attributes:
        coupling_line: the line of the user's code that needs the outputs of all rows at once; "" if
            there is none.
        early: the tensors that depend on all rows and that every microbatch needs; computed from
            `targets` and `masks` only.
    """

    def __init__(
        self,
        name: str,
        program: Callable[[list[Any], list[Any], list[Any], list[Any]], list[Any]],
        outputs: Sequence[ValueSpec],
        masks: Sequence[ValueSpec],
        targets: Sequence[tf.TensorSpec],
        others: Sequence[tf.TensorSpec],
        *,
        known_masks: bool,
        layouts_of_variables: Callable[[], Mapping[int, Layout]],
        jit: bool = False,
    ) -> None:
        self._name, self._jit = name, jit
        sizes = [len(outputs), len(masks), len(targets), len(others)]
        layouts: list[Layout] = []

        def traced(*tensors: tf.Tensor) -> list[tf.Tensor]:
            given = iter(tensors)
            parts = [[next(given) for _ in range(size)] for size in sizes]
            with GlobalStep():
                results = program(*parts)
            layouts.extend(layout for _, layout in results)
            return [tf.convert_to_tensor(tensor) for tensor, _ in results]

        specs = [*(spec.spec for spec in (*outputs, *masks)), *targets, *others]
        graph = trace_into_graph(name, traced, tuple(specs))
        self._layouts = layouts
        symbol = Symbol()
        known = [spec.value(symbol) for spec in (*outputs, *masks)]
        known += [_of_batch(t, symbol) for t in graph.inputs[len(known) : sum(sizes[:3])]]
        known += [Value(WHOLE, dims_of(t)) for t in graph.inputs[len(known) : sum(sizes)]]
        outer = {id(inside): outside for outside, inside in graph.captures}
        self._captured = [outer[id(t)] for t in graph.inputs[sum(sizes) :]]
        of_variables = layouts_of_variables()
        for value, t in zip(self._captured, graph.inputs[sum(sizes) :], strict=True):
            known.append(Value(of_variables.get(id(value), WHOLE), dims_of(t)))
        self._analysis = Analysis(graph, known, symbol)
        self._given = sum(sizes)
        late = graph.inputs[: len(outputs) + (0 if known_masks else len(masks))]
        communicated = self._analysis.communicated(layouts)
        self.coupling_line = self._find_coupling(communicated, {t.op for t in late})
        self.early = [] if self.coupling_line else [tensor for tensor, _ in communicated]
        self._function: Any = None

    def _find_coupling(self, communicated: Sequence[Any], late: set[Any]) -> str:
        for resource, op in writes(self._analysis.operations):
            if self._analysis.value_of(resource).layout.kind == "whole":
                return where(op)
        inside = {id(t) for op in self._analysis.operations for t in op.outputs}
        for tensor, op in communicated:
            before = ancestors([tensor])
            reads = any(t.dtype == tf.resource for o in before for t in o.inputs)
            if id(tensor) not in inside or reads or before & late:
                return where(op)
        return ""

    def transfers(self, rows: int, replicas: int) -> list[Transfer]:
        """Returns the transfers of the program.

        Args:
            rows: the number of rows of the batch.
            replicas: the number of replicas.
        """
        return transfers(self._analysis, rows, replicas, self._layouts)

    def whole(
        self,
        emitter: WorkerEmitter,
        outputs: Sequence[Any],
        masks: Sequence[Any],
        targets: Sequence[Any],
        others: Sequence[Any],
    ) -> list[tf.Tensor]:
        """Adds the program for all of a replica's rows.

        Args:
            emitter: the replica's emitter.
            outputs: the model's outputs for the replica's rows.
            masks: the masks of the outputs.
            targets: the targets and sample weights.
            others: the further arguments.
        """
        given = [*outputs, *masks, *targets, *others, *self._captured]
        return Partition(self._analysis, emitter).add(given, self._layouts)

    def compute_early(
        self,
        emitter: WorkerEmitter,
        masks: Sequence[Any],
        targets: Sequence[Any],
        others: Sequence[Any],
    ) -> list[tf.Tensor]:
        """Computes the tensors in `early`.

        Args:
            emitter: the replica's emitter.
            masks: the masks of the outputs for the replica's rows.
            targets: the targets and sample weights.
            others: the further arguments.
        """
        if not self.early:
            return []
        missing = self._given - len(masks) - len(targets) - len(others)
        given = [*([None] * missing), *masks, *targets, *others, *self._captured]
        part = self._analysis.up_to(self.early)
        return Partition(part, emitter).add(given, [WHOLE] * len(self.early))

    def microbatch(
        self,
        share: RowShare,
        early: Sequence[tf.Tensor],
        outputs: Sequence[Any],
        masks: Sequence[Any],
        targets: Sequence[Any],
        others: Sequence[Any],
    ) -> list[tf.Tensor]:
        """Adds the program for one microbatch as a call of a function shared by all microbatches.

        Args:
            share: the rows of the microbatch.
            early: as returned by `compute_early`.
            outputs: the model's outputs for these rows.
            masks: the masks of the outputs.
            targets: the targets and sample weights.
            others: the further arguments.

        Returns:
            The results, and a tensor that is available when the program has run.
        """
        given = [share.rows, share.total, share.first, share.has_rows, share.is_first]
        given += [*early, *outputs, *masks, *targets, *others]
        if self._function is None:
            self._function = self._make()
        return list(self._function(*given))

    def _make(self) -> Any:
        inputs = self._analysis.graph.inputs[: self._given]

        def run(*tensors: tf.Tensor) -> list[tf.Tensor]:
            own, total, first, has_rows, is_first = tensors[:5]
            early = tensors[5 : 5 + len(self.early)]
            share = RowShare(own, total, first, has_rows, tf.equal(first, 0) & has_rows, is_first)
            known = dict(zip((t.ref() for t in self.early), early, strict=True))
            partition = Partition(self._analysis, WorkerEmitter(share, NoCommunication()), known)
            given = [*tensors[5 + len(self.early) :], *self._captured]
            results = partition.add(given, self._layouts)
            with tf.control_dependencies(partition.effects()):
                return [*(tf.identity(t) for t in results), tf.zeros([])]

        run.__name__ = self._name
        specs = [tf.TensorSpec([], tf.int32)] * 3 + [tf.TensorSpec([], tf.bool)] * 2
        specs += [tf.TensorSpec(t.shape, t.dtype) for t in (*self.early, *inputs)]
        # If inlined, the function would be optimized again at every call site.
        return tf.function(
            compiled_between_collectives(run) if self._jit else run,
            autograph=False,
            input_signature=specs,
            experimental_attributes={"_noinline": True},
        )


def _of_batch(tensor: tf.Tensor, batch: Symbol) -> Value:
    """Returns the layout and dimensions of a component of a batch."""
    dims = dims_of(tensor)
    return Value(rows(), (Dim(1, (batch,)), *dims[1:])) if dims else Value(WHOLE, dims)
