"""Private APIs of TensorFlow: graphs that are traced for XLA, and the operations in them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from tensorflow.core.framework import attr_value_pb2
from tensorflow.python.framework import func_graph as _func_graph
from tensorflow.python.framework import function_def_to_graph as _function_def_to_graph
from tensorflow.python.framework import ops as _ops
from tensorflow.python.ops import control_flow_ops as _control_flow_ops
from tensorflow.python.ops import control_flow_util as _control_flow_util

_KEPT = "_tfdist_functions"


def trace_for_xla(function: Callable[[], Any]) -> Any:
    """Traces a function without arguments as one that XLA compiles, into a graph of its own.

    Returns:
        The `FuncGraph`: its `captures` are pairs of an outer tensor and its placeholder, and
        `structured_outputs` what the function has returned.
    """

    def traced_function() -> Any:
        context = _control_flow_ops.XLAControlFlowContext()
        context.Enter()
        try:
            return function()
        finally:
            context.Exit()

    return _func_graph.func_graph_from_py_func("compiled", traced_function, (), {})


def in_xla_context() -> bool:
    """Whether XLA will compile what is added to the default graph."""
    return bool(_control_flow_util.GraphOrParentsInXlaContext(_ops.get_default_graph()))


def graph_of_function(graph: Any, name: str, shapes: list[Any]) -> Any:
    """The `FuncGraph` of a function that a graph's operation calls.

    Args:
        graph: the graph.
        name: the function's name.
        shapes: those of its inputs.
    """
    definition = graph._get_function(name).cached_definition
    with graph.as_default():
        return _function_def_to_graph.function_def_to_graph(
            definition, input_shapes=shapes, include_library_functions=True
        )


@contextlib.contextmanager
def marking_operations(name: str) -> Iterator[None]:
    """Operations that are added to the default graph in this context have a boolean attribute.

    Args:
        name: the attribute's name, which begins with an underscore.
    """
    mark = attr_value_pb2.AttrValue(b=True)
    with _ops.get_default_graph()._attr_scope({name: mark}):
        yield


def keep_functions(graph: Any, of: Any) -> None:
    """Keeps the functions that a graph calls for as long as another graph exists.

    A definition that is imported into a graph names functions, but does not keep them.
    """
    kept = getattr(graph, _KEPT, [])
    setattr(graph, _KEPT, [*kept, *of._functions.values()])


def add_control_inputs(operation: Any, others: list[Any]) -> None:
    """Has an operation of a graph wait for others of it."""
    if others:
        operation._add_control_inputs(others)
