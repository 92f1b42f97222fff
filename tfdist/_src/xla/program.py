"""The operations of a traced graph, in a valid order of execution."""

import heapq
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist._src.internals.graphs import captured_from

_SHAPES: dict[str, Callable[[list[int]], Any]] = {
    "Shape": lambda shape: shape,
    "Size": np.prod,
    "Rank": len,
}
_MAX_ELEMENTS = 1024
# This operation computes the axes along which gradients are summed. Its static shape is unknown.
_AXES = "BroadcastGradientArgs"


class TracedProgram:
    """The operations of a graph that have to run for its results and side effects.

    Args:
        graph: a `FuncGraph`.
        results: the tensors to compute.

    Attributes:
        operations: the operations to run, except for constant operations. Each operation follows
            its sources.
        before: maps each operation to its sources among `operations`.
        constant: the constant operations. Their values depend only on the graph. They are so cheap
            that each function that needs them repeats them.
    """

    def __init__(self, graph: Any, results: Sequence[tf.Tensor]) -> None:
        wanted = _needed([*(t.op for t in results), *graph.control_outputs])
        everything = _in_order([op for op in graph.get_operations() if op in wanted])
        self.constant: set[Any] = set()
        for op in everything:
            if _is_constant(op, self.constant):
                self.constant.add(op)
        self.operations = [op for op in everything if op not in self.constant]
        self.before = {op: _sources(op) - self.constant for op in self.operations}
        self._devices: dict[Any, str] = {}
        self._definition = graph.as_graph_def()
        self._nodes = {node.name: node for node in self._definition.node}
        self._functions = {f.signature.name: f for f in self._definition.library.function}

    def device_of(self, operation: Any) -> str:
        """Returns the device that an operation runs on, such as "CPU:0"."""
        if operation not in self._devices:
            self._devices[operation] = _device_of(operation)
        return self._devices[operation]

    def definition(self, operations: Sequence[Any], values: dict[Any, Any]) -> Any:
        """Returns the `GraphDef` of some operations and of the constant operations that they need.

        Control dependencies on other operations are left out.

        Args:
            operations: the operations, which may include constant operations.
            values: maps operations to constants that replace them. These operations must have a
                single output, and need not be in `operations`.
        """
        made = tf.compat.v1.GraphDef(versions=self._definition.versions)
        constants = [op for op in self._constants_of(operations) if op not in values]
        constants += [op for op in operations if op in self.constant and op not in constants]
        operations = [op for op in operations if op not in self.constant]
        names = {op.name for op in (*operations, *constants, *values)}
        for op, value in values.items():
            made.node.append(_constant_node(op, value))
        for op in (*constants, *operations):
            if op in values:
                continue
            if op in self.constant and op.type in _SHAPES:
                made.node.append(_constant_node(op, _static_value(op)))
                continue
            node = made.node.add()
            node.CopyFrom(self._nodes[op.name])
            node.attr.pop("_class", None)
            kept = [i for i in node.input if not i.startswith("^") or i[1:] in names]
            del node.input[:]
            node.input.extend(kept)
        self._add_functions(made)
        return made

    def functions_with(self, is_meant: Callable[[Any], bool], *, kept: bool = True) -> set[str]:
        """Returns the names of the functions that contain matching nodes, at any depth.

        Args:
            is_meant: returns whether a node matches.
            kept: whether to also include all functions that TensorFlow does not inline.
        """
        found = {
            name
            for name, function in self._functions.items()
            if (kept and function.attr["_noinline"].b) or any(map(is_meant, function.node_def))
        }
        grows = True
        while grows:
            callers = {
                name
                for name, function in self._functions.items()
                if name not in found
                and any(found.intersection(called_by(node)) for node in function.node_def)
            }
            found |= callers
            grows = bool(callers)
        return found

    def _constants_of(self, operations: Sequence[Any]) -> list[Any]:
        found: dict[Any, None] = {}

        def add(op: Any) -> None:
            for source in _sources(op) & self.constant if op.type not in _SHAPES else ():
                if source not in found:
                    add(source)
                    found[source] = None

        for op in operations:
            for source in _sources(op) & self.constant:
                if source not in found:
                    add(source)
                    found[source] = None
        return list(found)

    def _add_functions(self, definition: Any) -> None:
        """Adds the functions that a definition calls, directly or indirectly."""
        left = [name for node in definition.node for name in called_by(node)]
        added: set[str] = set()
        while left:
            name = left.pop()
            if name in added or name not in self._functions:
                continue
            added.add(name)
            function = self._functions[name]
            definition.library.function.append(function)
            left += [called for node in function.node_def for called in called_by(node)]
        for gradient in self._definition.library.gradient:
            if gradient.function_name in added:
                definition.library.gradient.append(gradient)


def has_shape(tensor: tf.Tensor) -> bool:
    """Whether a tensor has a shape; resources of variables and lists of tensors have none."""
    return tensor.dtype not in (tf.resource, tf.variant)


def called_by(node: Any) -> list[str]:
    """Returns the names of the functions that a node calls."""
    attributes = node.attr.values()
    one = [a.func.name for a in attributes if a.HasField("func")]
    return one + [f.name for a in attributes if a.HasField("list") for f in a.list.func]


def _device_of(op: Any) -> str:
    # If an operation has no device, it runs on its variable's device.
    variables = [captured_from(t).device for t in op.inputs if t.dtype == tf.resource]
    for device in filter(None, [op.device, *variables]):
        spec = tf.DeviceSpec.from_string(device)
        if spec.device_type:
            return f"{spec.device_type}:{spec.device_index or 0}"
    return "GPU:0" if tf.config.list_logical_devices("GPU") else "CPU:0"


def _sources(op: Any) -> set[Any]:
    return {t.op for t in op.inputs} | set(op.control_inputs)


def _needed(wanted: Collection[Any]) -> set[Any]:
    found: set[Any] = set()
    left = list(wanted)
    while left:
        op = left.pop()
        if op not in found:
            found.add(op)
            left += _sources(op)
    return found


def _in_order(operations: Sequence[Any]) -> list[Any]:
    """Sorts operations so that each one follows its sources; otherwise keeps the given order."""
    number = {op: i for i, op in enumerate(operations)}
    waiting = {op: len(_sources(op)) for op in operations}
    users: dict[Any, list[Any]] = {op: [] for op in operations}
    for op in operations:
        for source in _sources(op):
            users[source].append(op)
    ready = [number[op] for op in operations if not waiting[op]]
    heapq.heapify(ready)
    ordered = []
    while ready:
        op = operations[heapq.heappop(ready)]
        ordered.append(op)
        for user in users[op]:
            waiting[user] -= 1
            if not waiting[user]:
                heapq.heappush(ready, number[user])
    return ordered


def _is_constant(op: Any, constant: Collection[Any]) -> bool:
    if op.control_inputs:
        return False
    if op.type == "Const":
        return True
    if op.type in _SHAPES:
        return bool(op.inputs[0].shape.is_fully_defined())
    if not op.inputs or op.op_def.is_stateful or called_by(op.node_def):
        return False
    if op.type.startswith("StatelessRandom"):  # XLA would draw other numbers than TensorFlow.
        return False
    if op.type == _AXES:
        return all(t.op in constant for t in op.inputs)
    small = all(t.shape.num_elements() is not None for t in op.outputs)
    small = small and sum(t.shape.num_elements() for t in op.outputs) <= _MAX_ELEMENTS
    return small and all(t.op in constant for t in op.inputs)


def _static_value(op: Any) -> Any:
    value = _SHAPES[op.type](op.inputs[0].shape.as_list())
    return np.array(value, op.outputs[0].dtype.as_numpy_dtype)


def _constant_node(op: Any, value: Any) -> Any:
    node = tf.compat.v1.NodeDef(name=op.name, op="Const")
    node.attr["dtype"].type = op.outputs[0].dtype.as_datatype_enum
    node.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(value, op.outputs[0].dtype))
    return node
