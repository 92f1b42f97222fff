"""Which operations stay TensorFlow's."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdist._src.comm import tokens
from tfdist._src.xla.noise import draws_other_numbers, is_random
from tfdist._src.xla.program import Program, called_by, has_shape
from tfdist._src.xla.tracing import is_has_rows, is_left_to_tensorflow

_COMMUNICATES = ("Tfdist", "Collective")
# What runs on the host, beside the graph.
_HOST = (
    "EagerPyFunc",
    "PyFunc",
    "Print",
    "Iterator",
    "Optional",
    "Lookup",
    "Mutex",
    "Stack",
    "Queue",
    "Summary",
    "Timestamp",
    "WriteSummary",
)
# Slower by XLA than by TensorFlow's libraries on CPUs: a CNN's step takes 1.3 times as long.
_SLOW_ON_CPUS = ("Conv2D", "Conv3D", "DepthwiseConv2d", "MaxPool", "AvgPool", "FusedBatchNorm")
_STRINGS = ("AsString", "String", "Regex", "Unicode")
CONDITIONALS = ("If", "StatelessIf")


def communicates(operation: Any) -> bool:
    """Whether an operation is one of tfdist's, or a collective of TensorFlow's."""
    return bool(operation.type.startswith(_COMMUNICATES))


def node_communicates(node: Any) -> bool:
    """The same of a node of a function."""
    return bool(node.op.startswith(_COMMUNICATES))


def left_out(program: Program, *, within: bool = False) -> set[Any]:
    """The operations that XLA does not compile.

    Args:
        program: the program.
        within: whether it is a branch of another program, so that what has no static shape may be
            equal on all workers, as an input is that has rows of all. It must be compiled on all
            workers or on none, and is not.

    Raises:
        UnsupportedError: collectives are in a function that is to be compiled as a whole.
    """
    _refuse_compiled_collectives(program)
    functions = program.functions_with(_is_no_part)
    found: set[Any] = set()
    gathered: set[Any] = set()  # have rows of other workers, whose number varies
    for op in program.operations:
        varies = any(not t.shape.is_fully_defined() for t in op.outputs if has_shape(t))
        theirs = communicates(op) or any(t.op in gathered for t in op.inputs if _varies(t))
        if varies and (theirs or within):
            gathered.add(op)
        if theirs or op in gathered or _stays(program, op, functions):
            found.add(op)
    return found


def has_several_of_a_kind(program: Program) -> bool:
    """Whether a program runs on several CPUs or several GPUs."""
    kinds = [name.partition(":")[0] for name in set(map(program.device_of, program.operations))]
    return len(kinds) > len(set(kinds))


def _is_compiled(node: Any) -> bool:
    return "_XlaMustCompile" in node.attr and bool(node.attr["_XlaMustCompile"].b)


def _refuse_compiled_collectives(program: Program) -> None:
    communicating = program.functions_with(node_communicates, kept=False)
    if not communicating:
        return

    def is_refused(node: Any) -> bool:
        return _is_compiled(node) and not communicating.isdisjoint(called_by(node))

    functions = program.functions_with(is_refused, kept=False)
    for op in program.operations:
        if is_refused(op.node_def) or not functions.isdisjoint(called_by(op.node_def)):
            raise tokens.refusal_to_compile(op.name)


def _is_no_part(node: Any) -> bool:
    """Whether a node of a function cannot be, or is, compiled by itself."""
    attributes = node.attr.values()
    types = [kind for a in attributes for kind in (a.type, *a.list.type)]
    return bool(
        _is_compiled(node)
        or node.op.startswith((*_COMMUNICATES, *_HOST))
        or is_random(node.op)  # XLA would draw other numbers.
        or tf.string.as_datatype_enum in types
        or node.op.startswith(_STRINGS)
        or (node.op.startswith(_SLOW_ON_CPUS) and not tf.config.list_logical_devices("GPU"))
    )


def _stays(program: Program, op: Any, functions: set[str]) -> bool:
    if op.type == "Placeholder" or op.type.startswith(_HOST) or draws_other_numbers(op):
        return True
    if is_left_to_tensorflow(op) or functions.intersection(called_by(op.node_def)):
        return True
    if op.type in CONDITIONALS and is_has_rows(op.inputs[0].op):
        return True  # Its branches have different numbers of rows.
    if op.type.startswith(_SLOW_ON_CPUS) and program.device_of(op).startswith("CPU"):
        return True
    tensors = [*op.inputs, *op.outputs]
    if any(t.dtype == tf.string for t in tensors):
        return True
    if op.type == "Bitcast" and any(t.dtype.is_complex for t in tensors):
        return True
    sources = (*(t.op for t in op.inputs), *op.control_inputs)
    device = program.device_of(op)
    return any(program.device_of(o) != device for o in sources if o.type != "Placeholder")


def _varies(tensor: tf.Tensor) -> bool:
    return has_shape(tensor) and not tensor.shape.is_fully_defined()
