"""Runs a program that computes the loss or the metrics from a model's outputs.

The program is traced for all rows of the batch. Like the step of a model without stages, it is then
partitioned, so that a worker can run its part of it. If the program treats rows independently, it
runs separately for each microbatch, as soon as the outputs of the microbatch are available.
Otherwise, it runs once, on the outputs of all microbatches.
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
    """A program that computes the loss or the metrics, traced for all rows of a batch.

    Args:
        name: the name of the program in profiles.
        program: a function of four lists of tensors, one for each of `outputs`, `masks`, `targets`
            and `others`. It returns the results, each as a pair of a tensor and the layout in which
            a worker needs this tensor.
        outputs: the specs of the model's outputs.
        masks: the specs of the masks of the outputs.
        targets: the specs of the targets and sample weights, which leave the number of rows open.
        others: the specs of further arguments, such as the loss scale, which do not depend on the
            rows.
        known_masks: whether the masks of all rows are available before the outputs of the first
            microbatch.
        layouts_of_variables: a function that returns the layouts of variables over the workers,
            by the `id` of a variable's resource.
        jit: whether XLA compiles the program.

    Attributes:
        coupling_line: a line of the user's code that needs the outputs of all rows together, or ""
            if there is none. If there is one, the program cannot run separately for each
            microbatch.
        early: tensors of the traced program that depend on all rows, and that the program needs for
            every microbatch. They do not depend on the outputs, so they can be computed before the
            first microbatch.
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
        """Returns the transfers between the replicas when they run the program.

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
        """Adds the program for all rows of a replica to the graph that is being traced.

        Args:
            emitter: the object that adds operations for the replica.
            outputs: the model's outputs for the replica's rows.
            masks: the masks of the outputs.
            targets: the targets and sample weights.
            others: the further arguments.

        Returns:
            The results of the program.
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
        """Computes the values of the tensors in `early`.

        Args:
            emitter: the object that adds operations for the replica.
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
        """Adds the program for one microbatch to the graph that is being traced.

        The program is added as a call of a function. All microbatches call the same function, so
        that it is traced only once.

        Args:
            share: the rows of the microbatch.
            early: the tensors that `compute_early` returned.
            outputs: the model's outputs for the rows of the microbatch.
            masks: the masks of the outputs.
            targets: the targets and sample weights.
            others: the further arguments.

        Returns:
            The results of the program, followed by a tensor that becomes available when the program
            has run.
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
    """Returns the layout and the dimensions of the targets or another component of a batch."""
    dims = dims_of(tensor)
    return Value(rows(), (Dim(1, (batch,)), *dims[1:])) if dims else Value(WHOLE, dims)
