"""Restricts functions of whole batches to the rows of one worker."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from tensorflow.core.framework import function_pb2

from tfdist._src.global_view.analysis import Analysis
from tfdist._src.global_view.decision import Value, dims_of
from tfdist._src.global_view.layout import WHOLE, Dim, Symbol, rows
from tfdist._src.global_view.partition import Partition, WorkerEmitter
from tfdist._src.global_view.resharding import RowShare
from tfdist._src.internals.graphs import graph_of_function

_READS = ("LookupTableFindV2", "LookupTableSizeV2", "ReadVariableOp", "ResourceGather")


class _NoCommunication:
    """Takes the place of the communication with other workers, which preprocessing has not."""

    scatters = False

    def reduce(self, tensors: Sequence[tf.Tensor], reductions: Sequence[str]) -> list[tf.Tensor]:
        raise NotImplementedError

    gather: Any = reduce
    scatter: Any = reduce

    def awaits_rows(self, values: Sequence[tf.Tensor]) -> None:
        pass

    def begin(self) -> None:
        raise NotImplementedError


def function_of_own_rows(
    definition: function_pb2.FunctionDef, shapes: Sequence[tf.TensorShape], captured: int
) -> tuple[function_pb2.FunctionDef, list[function_pb2.FunctionDef]] | None:
    """Restricts a function of a whole batch to the rows of one worker.

    Args:
        definition: the function. Its arguments are the components of a batch, whose first axis is
            the rows, followed by values that do not depend on the batch.
        shapes: the shapes of the components.
        captured: the number of the other arguments.

    Returns:
        A function of the number of rows of the whole batch, the index of the worker's first row,
        the worker's rows of each component, and the other arguments. It returns the two numbers and
        the worker's rows of each result. The list contains the functions that it calls. None if the
        rows of a result depend on rows of other workers, or if the function changes a variable.
    """
    if not all(shape.rank for shape in shapes):
        return None
    arguments = definition.signature.input_arg
    graph = graph_of_function(definition, [*shapes, *[tf.TensorShape(None)] * captured])
    sizes = {shape[0] for shape in shapes}
    symbol = Symbol(size=sizes.pop() if len(sizes) == 1 else None)
    values = []
    for placeholder in graph.inputs[: len(shapes)]:
        dims = dims_of(placeholder)
        values.append(Value(rows(), None if dims is None else (Dim(1, (symbol,)), *dims[1:])))
    values += [Value(WHOLE, dims_of(placeholder)) for placeholder in graph.inputs[len(shapes) :]]
    analysis = Analysis(graph, values, symbol)
    wanted = [rows()] * len(analysis.results)
    if analysis.communicated(wanted) or any(map(_writes, analysis.operations)):
        return None
    if any(value.layout != rows() for value in analysis.outputs):
        return None
    scalar = tf.TensorSpec([], tf.int32)
    specs = [
        tf.TensorSpec([None, *shape[1:]], tf.as_dtype(argument.type))
        for shape, argument in zip(shapes, arguments, strict=False)
    ]
    others = [
        tf.TensorSpec(None, tf.as_dtype(argument.type)) for argument in arguments[len(shapes) :]
    ]

    def own_rows(total: tf.Tensor, first: tf.Tensor, *given: tf.Tensor) -> list[tf.Tensor]:
        own = tf.shape(given[0])[0]
        is_first = tf.equal(first, 0)
        share = RowShare(own, total, first, None, is_first, is_first)
        emitter = WorkerEmitter(share, _NoCommunication())
        results = Partition(analysis, emitter).add(given, wanted)
        return [total, first, *results]

    traced = tf.function(own_rows, autograph=False).get_concrete_function(
        scalar, scalar, *specs, *others
    )
    if traced.captured_inputs:
        return None
    return traced.function_def, list(traced.graph.as_graph_def().library.function)


def _writes(operation: Any) -> bool:
    return operation.type not in _READS and any(
        tensor.dtype == tf.resource for tensor in operation.inputs
    )
