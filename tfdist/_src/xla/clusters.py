"""Decides which operations XLA compiles, and which of them it compiles together."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from tfdist._src.comm import tokens
from tfdist._src.xla import cluster_function
from tfdist._src.xla.program import TracedProgram, called_by, has_shape

_COMMUNICATES = ("Tfdist", "Collective")
# Prefixes of operation types that run on the host, outside of the graph.
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
# Prefixes of operation types that are slower with XLA than with TensorFlow's libraries on CPUs: a
# step of a CNN takes 1.3 times as long.
_SLOW_ON_CPUS = ("Conv2D", "Conv3D", "DepthwiseConv2d", "MaxPool", "AvgPool", "FusedBatchNorm")
_STRINGS = ("AsString", "String", "Regex", "Unicode")
CONDITIONALS = ("If", "StatelessIf")


def communicates(operation: Any) -> bool:
    """Whether an operation belongs to tfdist, or is a collective of TensorFlow."""
    return bool(operation.type.startswith(_COMMUNICATES))


def node_communicates(node: Any) -> bool:
    """Whether a node of a function belongs to tfdist, or is a collective of TensorFlow."""
    return bool(node.op.startswith(_COMMUNICATES))


def excluded_operations(program: TracedProgram, *, is_branch: bool = False) -> set[Any]:
    """Returns the operations of a program that XLA does not compile.

    Args:
        program: the program.
        is_branch: whether the program is a branch of a conditional in another program. In a branch,
            a value without a static shape may be equal on all workers, such as an input with the
            rows of all workers. The operation that computes this value is not compiled, because it
            must be compiled either on all workers or on none.

    Raises:
        UnsupportedError: a function that must be compiled as a whole contains collectives.
    """
    _refuse_compiled_collectives(program)
    functions = program.functions_with(_is_excluded_node)
    found: set[Any] = set()
    # Operations with results that may contain rows of other workers, in a varying number.
    gathered: set[Any] = set()
    for op in program.operations:
        varies = any(not t.shape.is_fully_defined() for t in op.outputs if has_shape(t))
        theirs = communicates(op) or any(t.op in gathered for t in op.inputs if _varies(t))
        if varies and (theirs or is_branch):
            gathered.add(op)
        if theirs or op in gathered or _is_excluded(program, op, functions):
            found.add(op)
    return found


def has_several_of_a_kind(program: TracedProgram) -> bool:
    """Whether a program runs on several CPUs or several GPUs."""
    kinds = [name.partition(":")[0] for name in set(map(program.device_of, program.operations))]
    return len(kinds) > len(set(kinds))


def _is_compiled(node: Any) -> bool:
    return "_XlaMustCompile" in node.attr and bool(node.attr["_XlaMustCompile"].b)


def _refuse_compiled_collectives(program: TracedProgram) -> None:
    communicating = program.functions_with(node_communicates, kept=False)
    if not communicating:
        return

    def is_refused(node: Any) -> bool:
        return _is_compiled(node) and not communicating.isdisjoint(called_by(node))

    functions = program.functions_with(is_refused, kept=False)
    for op in program.operations:
        if is_refused(op.node_def) or not functions.isdisjoint(called_by(op.node_def)):
            raise tokens.refusal_to_compile(op.name)


def _is_excluded_node(node: Any) -> bool:
    """Whether a node of a function cannot be compiled, or is compiled separately."""
    attributes = node.attr.values()
    types = [kind for a in attributes for kind in (a.type, *a.list.type)]
    return bool(
        _is_compiled(node)
        or node.op.startswith((*_COMMUNICATES, *_HOST))
        or cluster_function.is_random(node.op)  # XLA would draw other numbers than TensorFlow.
        or tf.string.as_datatype_enum in types
        or node.op.startswith(_STRINGS)
        or (node.op.startswith(_SLOW_ON_CPUS) and not tf.config.list_logical_devices("GPU"))
    )


def _is_excluded(program: TracedProgram, op: Any, functions: set[str]) -> bool:
    if (
        op.type == "Placeholder"
        or op.type.startswith(_HOST)
        or cluster_function.draws_other_numbers(op)
    ):
        return True
    if cluster_function.is_uncompiled(op) or functions.intersection(called_by(op.node_def)):
        return True
    if op.type in CONDITIONALS and cluster_function.is_has_rows(op.inputs[0].op):
        return True  # The branches of this conditional compute with different numbers of rows.
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


_READ = "ReadVariableOp"
# Operations that may return an input unchanged, depending on the other inputs, such as a product
# with 1. Matrix products and sums over an axis may also do this, but are assumed to mix their
# inputs.
_MAY_KEEP = frozenset(
    [
        *("AddN", "AddV2", "BiasAdd", "Maximum", "Minimum", "Mul", "RealDiv", "Sub"),
        *("BroadcastTo", "Cast", "Identity", "Relu", "Select", "SelectV2", "StopGradient"),
        *("ConcatV2", "DynamicStitch", "Gather", "GatherNd", "GatherV2", "Pack", "Pad", "PadV2"),
        *("ExpandDims", "Reshape", "Slice", "Split", "SplitV", "Squeeze", "StridedSlice"),
        *("Tile", "Transpose", "Unpack", "TensorScatterUpdate", "DynamicPartition"),
    ]
)


def own_operations(
    program: TracedProgram, given: Collection[Any], results: Sequence[tf.Tensor]
) -> set[Any]:
    """Returns the operations with results that need not be bit-identical on all workers.

    Args:
        program: the program.
        given: the placeholders for values that differ between workers.
        results: the program's results, which may have to be equal on all workers.
    """
    found = _computed_from(program, given)
    found |= _only_for(program, found, {t.op for t in results})
    # In a gradient, a constant has a control dependency on the operation that it was created for.
    # If this operation is a worker's own, the constant is too.
    return found | {
        op
        for op in program.operations
        if op.type == "Const" and not found.isdisjoint(op.control_inputs)
    }


def _computed_from(program: TracedProgram, given: Collection[Any]) -> set[Any]:
    """Returns the operations that compute with a worker's own values, without communication."""
    found = set(given)
    for op in program.operations:
        if not communicates(op) and (
            cluster_function.is_has_rows(op) or any(t.op in found for t in op.inputs)
        ):
            found.add(op)
    return found


def _only_for(program: TracedProgram, own: Collection[Any], wanted: Collection[Any]) -> set[Any]:
    """Returns the operations that only a worker's own operations use, such as a mask.

    Operations with side effects are left out. An operation is also left out if a function call uses
    its result, because the function may also use the result for other values than the worker's own.
    And it is left out if its result may reach a variable or a result of the program unchanged, for
    example through a selection by a condition that is equal on all workers.
    """
    users: dict[Any, list[Any]] = {}
    for op in program.operations:
        for tensor in op.inputs:
            users.setdefault(tensor.op, []).append(op)
    kept = _kept_as_they_are(program, users, wanted)
    found: set[Any] = set()
    for op in reversed(program.operations):
        if op in own or op in kept or communicates(op) or op.type == "Placeholder":
            continue
        using = users.get(op, [])
        if using and not _has_effects(op) and all(u in own or u in found for u in using):
            found.add(op)
    return found


def _kept_as_they_are(
    program: TracedProgram, users: Mapping[Any, Sequence[Any]], wanted: Collection[Any]
) -> set[Any]:
    """Returns the operations with results that may reach a variable, call or result unchanged."""
    found: set[Any] = set()
    for op in reversed(program.operations):
        using = users.get(op, [])
        arrives = any(_has_effects(user) or called_by(user.node_def) for user in using)
        if op in wanted or arrives or any(u in found and u.type in _MAY_KEEP for u in using):
            found.add(op)
    return found


def _has_effects(op: Any) -> bool:
    return bool(op.op_def.is_stateful) and op.type != _READ and not communicates(op)


_MIN_OPERATIONS = 8
_MIN_SMALL_OPERATIONS = 64
_SMALL = 32  # elements
_LARGE = 1 << 14
_ROWS = 8  # the assumed size of each unknown dimension
_NOTHING = ("Const", "Identity", "InvertPermutation", "NoOp", "Pack", "Reshape", "Shape")
_HEAVY = ("MatMul", "BatchMatMul", "Einsum", "Conv", "Depthwise")
_READS = ("ReadVariableOp", "VariableShape", "VarIsInitializedOp", "ResourceGather")


@dataclass(frozen=True)
class Unit:
    """Operations that are added to the new graph together.

    Attributes:
        operations: the operations, in order.
        compiled: whether the operations are a cluster.
        own: whether the results are this worker's own. Other workers may then compute their own
            results in a different way.
    """

    operations: Sequence[Any]
    compiled: bool
    own: bool = False


def divide(program: TracedProgram, excluded: set[Any], own: set[Any]) -> list[Unit]:
    """Divides a program into clusters and excluded operations, in a valid order of execution.

    For each operation, the first excluded operation that needs it (in the program's order)
    determines its cluster. Operations that no excluded operation needs form the last cluster. So a
    cluster waits only for operations that its excluded operation would wait for anyway, and no two
    clusters wait for each other. A worker's own operations are in other clusters than operations
    with results that may have to be equal on all workers: some workers may compile their own
    operations while others do not.

    Args:
        program: the program.
        excluded: the program's operations that XLA does not compile.
        own: the program's operations that compute a worker's own values.
    """
    number = {op: i for i, op in enumerate(program.operations)}
    marks = {op for op in program.operations if op.type == "TfdistReady"}
    excluded = excluded | _ends(program, excluded, marks)
    first = _needed_first(program, excluded - marks)
    levels = _levels(program, first, excluded, own)
    groups: dict[tuple[int, int, str], list[Any]] = {}
    for op in program.operations:
        if op not in excluded:
            groups.setdefault((first[op], levels[op], program.device_of(op)), []).append(op)
    # An excluded operation follows its cluster, and the cluster follows its reads of variables.
    placed: list[tuple[tuple[int, int, int, str, int], Unit]] = []
    for op in program.operations:
        if op in excluded:
            position, behind = (first[op], 1) if op in marks else (number[op], 2)
            placed.append(((position, behind, 0, "", 0), Unit([op], compiled=False)))
    for (position, level, device), members in groups.items():
        reads = _only_read(program, members)
        rest = [op for op in members if op not in set(reads)]
        cluster = Unit(rest, compiled=_is_worth_it(rest), own=members[0] in own)
        placed.append(((position, 0, level, device, 0), Unit(reads, compiled=False)))
        placed.append(((position, 0, level, device, 1), cluster))
    placed = [(key, unit) for key, unit in placed if unit.operations]
    return [unit for _, unit in sorted(placed, key=lambda item: item[0])]


def _needed_first(program: TracedProgram, boundaries: set[Any]) -> dict[Any, int]:
    """Maps each operation to the index of the first boundary operation that needs it."""
    first = dict.fromkeys(program.operations, len(program.operations))
    for number, op in reversed(list(enumerate(program.operations))):
        needed_by = number if op in boundaries else first[op]
        for source in program.before[op]:
            first[source] = min(first[source], needed_by)
    return first


def _ends(program: TracedProgram, excluded: set[Any], marks: set[Any]) -> set[Any]:
    """Returns the operations at the end of a function that wait for marks.

    They are excluded from clusters. Marks report to the recorder that other operations have run
    (`comm/tracing.py`). This function also removes a mark from `marks` if any other operation that
    is not excluded waits for the mark.
    """
    ends: set[Any] = set()
    for op in program.operations:
        if op not in excluded and not marks.isdisjoint(program.before[op]):
            if op.type in ("Identity", "NoOp"):
                ends.add(op)
            else:
                marks -= program.before[op]
    return ends


def _is_worth_it(operations: Sequence[Any]) -> bool:
    """Whether operations probably take longer than the start of a compiled program (30 µs)."""
    computing = [op for op in operations if op.type not in _NOTHING]
    sizes = [max((_elements(t) for t in op.outputs), default=0) for op in computing]
    return (
        len(computing) >= _MIN_SMALL_OPERATIONS
        or sum(size >= _SMALL for size in sizes) >= _MIN_OPERATIONS
        or max(sizes, default=0) >= _LARGE
        or any(op.type.startswith(_HEAVY) for op in operations)
    )


def _elements(tensor: tf.Tensor) -> int:
    if not has_shape(tensor) or tensor.shape.rank is None:
        return 0
    return math.prod(_ROWS if n is None else n for n in tensor.shape)


def exchanging_lists(
    program: TracedProgram, units: Sequence[Unit], results: Sequence[tf.Tensor]
) -> set[Any]:
    """Returns the operations of clusters that exchange lists of tensors with other operations.

    XLA does not support a list as an input or a result of a function. Examples are the lists of
    values that a loop keeps for its backward pass.
    """
    clusters = {op: unit if unit.compiled else None for unit in units for op in unit.operations}
    found = {t.op for t in results if t.dtype == tf.variant and clusters.get(t.op)}
    for op in program.operations:
        for tensor in op.inputs:
            if tensor.dtype == tf.variant and tensor.op in clusters:
                of_both = clusters[op], clusters[tensor.op]
                if of_both[0] is not of_both[1]:
                    found |= {o for o, place in zip((op, tensor.op), of_both, strict=True) if place}
    return found


def _levels(
    program: TracedProgram, first: dict[Any, int], excluded: set[Any], own: set[Any]
) -> dict[Any, int]:
    """Maps each operation to a level, so that own and other operations have different levels.

    On a path through the graph, the level increases at each change from own to other operations or
    back: other operations may have to wait for own operations, as an update waits for a read of the
    same variable. Only operations with the same boundary are on such a path.
    """
    levels: dict[Any, int] = {}
    for op in program.operations:
        if op in excluded:
            continue
        levels[op] = int(op in own)
        for source in program.before[op]:
            if source in levels and first[source] == first[op]:
                changes = (source in own) != (op in own)
                levels[op] = max(levels[op], levels[source] + changes)
    return levels


def _only_read(program: TracedProgram, members: Sequence[Any]) -> list[Any]:
    """Returns a cluster's reads of the variables that the cluster does not write.

    XLA would copy these variables. It does not copy a variable that the cluster also writes, but
    updates the variable in place.
    """
    inside = set(members)
    written = {
        id(t)
        for op in members
        if not op.type.startswith(_READS)
        for t in op.inputs
        if t.dtype == tf.resource
    }
    return [
        op
        for op in members
        if op.type == "ReadVariableOp"
        and id(op.inputs[0]) not in written
        and not program.before[op] & inside
    ]
