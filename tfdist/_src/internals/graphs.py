"""Private APIs of TensorFlow, to trace, inspect and copy graphs, in particular for XLA."""

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.core.framework import attr_value_pb2
from tensorflow.python.eager import record as _record
from tensorflow.python.framework import func_graph as _func_graph
from tensorflow.python.framework import function_def_to_graph as _function_def_to_graph
from tensorflow.python.framework import ops as _ops
from tensorflow.python.ops import cond_v2 as _cond_v2
from tensorflow.python.ops import control_flow_ops as _control_flow_ops
from tensorflow.python.ops import control_flow_util as _control_flow_util
from tensorflow.python.ops import control_flow_util_v2 as _control_flow_util_v2

_KEPT = "_tfdist_functions"
_mark = _control_flow_util_v2.maybe_set_lowering_attr
_traces_lock = threading.Lock()
_traces = 0  # the number of threads that are in `_lowering`


class _InParts(_control_flow_ops.XLAControlFlowContext):  # type: ignore[misc]
    """Marks a graph that XLA compiles in parts, instead of as a whole."""


def trace_for_xla(function: Callable[[], Any]) -> Any:
    """Traces a function without arguments into a separate graph, so that XLA can compile it.

    Loops and conditionals that XLA does not compile are lowered to basic operations, as TensorFlow
    does in graphs without XLA. Otherwise they would run as function calls, in which TensorFlow
    cannot use oneDNN.

    Returns:
        The `FuncGraph`. Its attribute `captures` contains pairs of a tensor from outside the graph
        and the placeholder for it. Its attribute `structured_outputs` contains the results of the
        function.
    """

    def traced_function() -> Any:
        context = _InParts()
        context.Enter()
        try:
            with _lowering():
                return function()
        finally:
            context.Exit()

    return _func_graph.func_graph_from_py_func("compiled", traced_function, (), {})


@contextlib.contextmanager
def _lowering() -> Iterator[None]:
    """Lowers loops and conditionals that are created within this context.

    Several threads may be in this context at the same time.
    """
    global _traces
    with _traces_lock:
        _traces += 1
        _control_flow_util_v2.maybe_set_lowering_attr = _lower
    try:
        yield
    finally:
        with _traces_lock:
            _traces -= 1
            if _traces == 0:
                _control_flow_util_v2.maybe_set_lowering_attr = _mark


def _lower(operation: Any, lower_using_switch_merge: bool | None = None) -> None:
    _mark(operation, lower_using_switch_merge is not False)


def captured_from(tensor: Any) -> Any:
    """Returns the original tensor, if graphs have captured it and `tensor` is its placeholder."""
    graph = getattr(tensor, "graph", None)
    for outer, inner in getattr(graph, "captures", ()):
        if inner is tensor:
            return captured_from(outer)
    return tensor


def variables_read(graph: Any) -> list[Any]:
    """Returns those variables that were read while a graph was traced and that still exist."""
    return [variable for r in graph._weak_variables if (variable := r()) is not None]


def in_xla_context() -> bool:
    """Whether XLA will compile operations that are now added to the default graph."""
    return bool(_control_flow_util.GraphOrParentsInXlaContext(_ops.get_default_graph()))


def is_compiled_whole() -> bool:
    """Whether XLA will compile the default graph as a whole.

    XLA does so in a `tf.function` with `jit_compile=True`, and in all functions that are called
    there. This is False if tfdist lets XLA compile only parts of the graph.
    """
    for graph in _graphs_around():
        context = _control_flow_util.GetContainingXLAContext(graph._get_control_flow_context())
        if context is not None and not isinstance(context, _InParts):
            return True
    return False


def is_in_loop() -> bool:
    """Whether operations that are now added to the default graph are part of a `tf.while_loop`."""
    return any(map(_control_flow_util_v2.in_while_loop_defun, _graphs_around()))


def _graphs_around() -> Iterator[Any]:
    """Yields the default graph, and then the graphs that contain it."""
    graph = _ops.get_default_graph()
    while graph is not None:
        yield graph
        graph = getattr(graph, "outer_graph", None)


def branches_of(conditional: Any) -> tuple[Any, Any]:
    """Returns the graphs of the two branches of an `If` operation, first the one for True."""
    then_graph, else_graph = _cond_v2.get_func_graphs(conditional)
    return then_graph, else_graph


def mark_what_is_only_read(conditional: Any, branches: tuple[Any, Any]) -> None:
    """Marks variables that an `If` operation only reads.

    Other operations that read these variables then need not wait for the `If` operation.
    """
    _cond_v2._set_read_only_resource_inputs_attr(conditional, branches)


@contextlib.contextmanager
def marking_operations(name: str, numbers: Sequence[int] | None = None) -> Iterator[None]:
    """Adds an attribute to all operations that are created in the default graph in this context.

    Args:
        name: the name of the attribute. It must begin with an underscore.
        numbers: the value of the attribute, a list of integers. By default, the value is True.
    """
    mark = attr_value_pb2.AttrValue(b=True)
    if numbers is not None:
        mark = attr_value_pb2.AttrValue(list=attr_value_pb2.AttrValue.ListValue(i=numbers))
    with _ops.get_default_graph()._attr_scope({name: mark}):
        yield


def identities(values: Sequence[Any], gradient: str) -> list[Any]:
    """Adds an `IdentityN` operation with a custom gradient to the default graph.

    Unlike `tf.custom_gradient`, this function does not prevent the deletion of graphs.

    Args:
        values: tensors of the default graph.
        gradient: the name of the gradient, as registered with `tf.RegisterGradient`.
    """
    function = _ops.gradient_registry.lookup(gradient)
    overriding = _ops.get_default_graph().gradient_override_map({"IdentityN": gradient})
    with _record.stop_recording(), overriding:
        results: list[Any] = tf.raw_ops.IdentityN(input=list(values))
    operation = results[0].op

    def backward(*gradients: Any) -> Any:
        return function(operation, *gradients)

    # A gradient tape calls the recorded function. The gradient of a graph, such as the graph of a
    # loop, uses the registered gradient instead.
    _record.record_operation(gradient, results, list(values), backward)
    return results


def of_unknown_sizes(value: Any, axes: Sequence[int]) -> Any:
    """Returns the same tensor with unknown static sizes along some axes."""
    shape = [None if axis in axes else size for axis, size in enumerate(value.shape)]
    # `tf.autodiff.ForwardAccumulator` cannot differentiate an operation with a `shape` attribute,
    # so the operation is recorded as an identity.
    with _record.stop_recording():
        result = tf.raw_ops.PlaceholderWithDefault(input=value, shape=shape)
    _record.record_operation("Identity", [result], [value], lambda gradient: [gradient])
    return result


def keep_functions(graph: Any, of: Any) -> None:
    """Keeps the functions of one graph alive as long as another graph exists.

    This is needed if the definition of graph `of` is imported into `graph`. The imported operations
    refer to functions only by name, and do not keep them alive.
    """
    kept = getattr(graph, _KEPT, [])
    setattr(graph, _KEPT, [*kept, *of._functions.values()])


def add_control_inputs(operation: Any, others: list[Any]) -> None:
    """Makes an operation wait for other operations of the same graph."""
    if others:
        operation._add_control_inputs(others)


def is_call(operation: Any) -> bool:
    """Whether an operation is a function call in the style of TensorFlow 1.

    The type of such an operation is the name of the function.
    """
    return operation.graph._get_function(operation.type) is not None


def called_graph(operation: Any, function: str) -> Any:
    """Returns the `FuncGraph` of a function that an operation calls.

    Args:
        operation: the operation that calls the function.
        function: the name of the function.
    """
    graph = operation.graph
    while graph is not None:
        found = graph._get_function(function)
        if found is not None and isinstance(getattr(found, "graph", None), _func_graph.FuncGraph):
            signature = found.cached_definition.signature
            sizes = len(signature.input_arg), len(signature.output_arg)
            if sizes == (len(found.graph.inputs), len(found.graph.outputs)):
                return found.graph
            # The computation of a gradient has added inputs or outputs to the graph, after the
            # function was defined. The definition still has the original inputs and outputs.
            shapes = [tensor.shape for tensor in found.graph.inputs[: len(signature.input_arg)]]
            with found.graph.outer_graph.as_default():
                return _function_def_to_graph.function_def_to_graph(found.cached_definition, shapes)
        graph = getattr(graph, "outer_graph", None)
    shapes = [tensor.shape for tensor in operation.inputs]
    return _control_flow_util_v2.get_func_graph(operation, shapes, function)


def graph_of_function(definition: Any, shapes: Sequence[Any]) -> Any:
    """Returns the `FuncGraph` of a function definition.

    Args:
        definition: the `FunctionDef`. TensorFlow must know the functions that it calls.
        shapes: the shapes of the function's arguments.
    """
    return _function_def_to_graph.function_def_to_graph(
        definition, input_shapes=list(shapes), include_library_functions=True
    )


def copy_operation(operation: Any, inputs: list[Any]) -> Any:
    """Adds a copy of an operation to the default graph.

    Args:
        operation: an operation of any graph.
        inputs: the inputs of the copy.

    Returns:
        The new operation. It has the control inputs of the current context, but not those of the
        original operation.
    """
    graph = _ops.get_default_graph()
    given = {
        name: value
        for name, value in operation.node_def.attr.items()
        if not name.startswith("_") or name.startswith("_tfdist")
    }
    return graph._create_op_internal(
        operation.type, inputs, [t.dtype for t in operation.outputs], None, operation.name, given
    )


def keep_functions_of(operation: Any) -> None:
    """Adds functions that are called by an operation of another graph to the default graph.

    The default graph then keeps these functions alive, and also the Python functions that they
    call.
    """
    graph = _ops.get_default_graph()
    kept = getattr(graph, _KEPT, [])
    if not any(one is operation.graph for one in kept):
        setattr(graph, _KEPT, [*kept, operation.graph])
    if operation.type in _WITH_FUNCTIONS or "Dataset" in operation.type:
        for attribute in operation.node_def.attr.values():
            names = [attribute.func.name] if attribute.HasField("func") else []
            names += [f.name for f in attribute.list.func]
            for name in names:
                function = operation.graph._get_function(name)
                if function is not None:
                    graph._add_function_recursive(function)


_WITH_FUNCTIONS = frozenset({"SymbolicGradient", "XlaLaunch", "MapDefun", "Scan", "For"})


def trace_into_graph(name: str, function: Any, arguments: tuple[Any, ...]) -> Any:
    """Traces a Python function into a new graph.

    Args:
        name: the name of the graph.
        function: the Python function to trace.
        arguments: the specs of the function's arguments, as nests of `tf.TypeSpec`s.

    Returns:
        The `FuncGraph`.
    """
    return _func_graph.func_graph_from_py_func(name, function, arguments, {})
