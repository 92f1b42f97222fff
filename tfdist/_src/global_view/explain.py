"""Reports and fingerprints the communication of a partitioned step.

The fingerprint of a tensor depends on the operations that compute it: their types, attributes and
order of operands, hashed as a Merkle tree. It ignores names, the number of rows, and operations
with unused results, such as prints. So workers that run the same program have the same sequence of
fingerprints; a worker that swaps two sums has a different sequence.
"""

import dataclasses
import hashlib
import os
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import tensorflow as tf

from tfdist._src.global_view.analysis import Analysis
from tfdist._src.global_view.decision import Value
from tfdist._src.global_view.layout import WHOLE, Layout, Symbol
from tfdist._src.global_view.transfer import SPARSE_GRADIENT, STATISTICS, Transfer, report

_PACKAGES = (
    str(Path(__file__).resolve().parents[2]) + os.sep,
    sysconfig.get_paths()["stdlib"] + os.sep,
)
_COLLECTIVES = (
    "TfdistAllReduce",
    "TfdistCompressedAllReduce",
    "TfdistReduceScatter",
    "CollectiveReduceV2",
    "CollectiveReduceV3",
)
_OPTIMIZERS = os.path.join("keras", "src", "optimizers", "")


def transfers(
    analysis: Analysis,
    batch: int | None = None,
    replicas: int | None = None,
    layouts: Sequence[Layout] | None = None,
) -> list[Transfer]:
    """Returns the values that a partitioned graph communicates.

    Args:
        analysis: the graph and its layouts.
        batch: the number of rows of the batch, from which sizes in bytes are computed.
        replicas: the number of replicas, from which the sizes of stacked values are computed.
        layouts: the required layouts of the graph's outputs; by default, all must be whole.
    """
    layouts = layouts or [WHOLE] * len(analysis.outputs)
    found = list(_transfers(analysis, layouts, analysis.batch, batch, set()))
    return [_of_replicas(t, replicas) if t.operation == _MOMENTS else t for t in found]


_MOMENTS = "moments"


def _of_replicas(transfer: Transfer, count: int | None) -> Transfer:
    """Multiplies the size of a transfer of one replica's values by the number of replicas."""
    one = transfer.size
    size = None if one is None or count is None else one * count
    return dataclasses.replace(transfer, size=size, shape=(count, *transfer.shape[1:]))


def _transfers(
    analysis: Analysis,
    layouts: Sequence[Layout],
    symbol: Symbol,
    batch: int | None,
    seen: set[int],
    why: str = "a result for all rows",
) -> Iterator[Transfer]:
    for op, decision in analysis.decisions.items():
        for tensor, layout in zip(op.inputs, decision.inputs, strict=True):
            value = analysis.value_of(tensor)
            own = value.layout
            if layout is None or layout == own or own.kind not in ("rows", "partial"):
                continue
            if (own.is_sum and layout.is_sum) or id(tensor) in seen:
                continue
            seen.add(id(tensor))
            yield _transfer(op, tensor, value, decision.reason, symbol, batch)
        if op.type in _COLLECTIVES:
            for tensor in op.inputs:
                if tensor.dtype.is_floating:
                    value, source = analysis.value_of(tensor), _source(tensor)
                    yield _transfer(source, tensor, value, "", symbol, batch, kind="reduce")
        for part in decision.parts:
            inside = decision.outputs
            if len(inside) != len(part.outputs):  # This part is the condition of a loop.
                inside = [value.layout for value in part.outputs]
            yield from _transfers(part, inside, symbol, batch, seen, "rows are coupled")
    results = zip(analysis.graph.outputs, analysis.outputs, layouts, strict=True)
    for tensor, value, layout in results:
        is_apart = layout == WHOLE and value.layout.kind in ("rows", "partial")
        if is_apart and id(tensor) not in seen:
            seen.add(id(tensor))
            reason = why if value.layout.kind == "rows" else ""
            yield _transfer(tensor.op, tensor, value, reason, symbol, batch)


def _source(tensor: Any) -> Any:
    """Returns the operation that computed a value, skipping identities."""
    while tensor.op.type in ("Identity", "IdentityN", "EnsureShape"):
        tensor = tensor.op.inputs[tensor.value_index]
    return tensor.op


def _transfer(
    op: Any,
    tensor: Any,
    value: Value,
    reason: str,
    symbol: Symbol,
    batch: int | None,
    *,
    kind: str = "",
) -> Transfer:
    shape = _sizes(value, symbol, batch)
    operation = op.type
    if value.layout.reduction == "stack":
        shape, operation = (1, *shape[1:]), _MOMENTS
        kind, reason = "gather", STATISTICS
    elif value.layout.kind == "rows" and _is_of_optimizer(op):
        reason = SPARSE_GRADIENT
    count: int | None = 1
    for size in shape:
        count = None if count is None or size is None else count * size
    element = tensor.dtype.size or 0
    bytes_ = count * element if count is not None and element else None
    kind = kind or ("gather" if value.layout.kind == "rows" else "reduce")
    reason = reason if kind == "gather" else ""
    return Transfer(kind, operation, bytes_, shape, where(op), reason, element)


def _sizes(value: Value, symbol: Symbol, batch: int | None) -> tuple[int | None, ...]:
    sizes: list[int | None] = []
    for dim in value.dims or ():
        size: int | None = dim.factor
        for one in dim.symbols:
            known = batch if one is symbol and one.size is None else one.size
            size = None if size is None or known is None else size * known
        sizes.append(size)
    return tuple(sizes)


def _is_of_optimizer(op: Any) -> bool:
    """Whether a Keras optimizer created an operation.

    If so, the operands with rows are sparse gradients.
    """
    return any(_OPTIMIZERS in frame.filename for frame in op.traceback or ())


def where(op: Any) -> str:
    """Returns the line of user code that created an operation, or else the operation's name."""
    for frame in reversed(op.traceback or ()):
        path = os.path.abspath(frame.filename)
        outside = not path.startswith(_PACKAGES) and f"{os.sep}site-packages{os.sep}" not in path
        if outside and os.path.exists(path):
            return f"{os.path.basename(path)}:{frame.lineno}"
    return str(op.name)


__all__ = ["Transfer", "report", "transfers", "where"]


# Attributes that fingerprints ignore, since they are names or depend on the machine.
_LEFT_OUT = frozenset(
    {
        "communicator",
        "config",
        "config_proto",
        "container",
        "executor_type",
        "gpu",
        "key",
        "output_shapes",
        "shape",
        "shapes",
        "shared_name",
        "token",
    }
)
# Prefixes of operation types that have side effects, but do not change variables or tables.
_TELLS = ("Assert", "Print", "Write", "FlushSummary", "Timestamp", "Tfdist")
_READS = frozenset({"ReadVariableOp", "ResourceGather", "ResourceGatherNd", "VarIsInitializedOp"})


class Fingerprints:
    """The fingerprints of the tensors of a graph.

    Args:
        graph: a `FuncGraph`.
        captured: maps the names of some placeholders to names that are equal on all workers. All
            other inputs of the graph are identified by their index.
    """

    def __init__(self, graph: Any, captured: Mapping[str, str] | None = None) -> None:
        definition = graph.as_graph_def()
        functions = {f.signature.name: f for f in definition.library.function}
        self._functions = _Functions(functions)
        inputs = {t.op.name: f"input {i}" for i, t in enumerate(graph.inputs)}
        self._found: dict[str, str] = {}
        known = {**inputs, **(captured or {})}
        nodes = {node.name: node for node in definition.node}
        for operation in graph.get_operations():
            name = operation.name
            if name in known:
                self._found[name] = _hash(known[name])
            else:
                self._found[name] = self._of(nodes[name])

    def of(self, item: Any) -> str:
        """Returns the fingerprint of a tensor or an operation."""
        if isinstance(item, tf.Tensor):
            return _hash(self._found[item.op.name], str(item.value_index))
        return self._found[item.name]

    def _of(self, node: Any) -> str:
        operands = []
        for given in node.input:
            if not given.startswith("^"):
                source, _, index = given.partition(":")
                operands.append(f"{self._found.get(source, '')}:{index or 0}")
        return _hash(node.op, *_attributes(node, self._functions), *operands)


def effects(graph: Any) -> list[Any]:
    """Returns the operations of a graph that change state, in order."""
    return [
        op
        for op in graph.get_operations()
        if op.type not in _READS
        and not op.type.startswith(_TELLS)
        and any(tensor.dtype == tf.resource for tensor in op.inputs)
    ]


class _Functions:
    """The fingerprints of the functions of a graph, by name."""

    def __init__(self, definitions: Mapping[str, Any]) -> None:
        self._definitions = definitions
        self._found: dict[str, str] = {}

    def of(self, name: str) -> str:
        if name not in self._found:
            self._found[name] = ""  # Ends the recursion if the function calls itself.
            definition = self._definitions.get(name)
            self._found[name] = "" if definition is None else self._of(definition)
        return self._found[name]

    def _of(self, definition: Any) -> str:
        numbers = {arg.name: f"a{i}" for i, arg in enumerate(definition.signature.input_arg)}
        numbers |= {node.name: f"n{i}" for i, node in enumerate(definition.node_def)}

        def operand(given: str) -> str:
            source, _, rest = given.partition(":")
            return f"{numbers.get(source, '')}:{rest}"

        parts = []
        for node in definition.node_def:
            given = [operand(one) for one in node.input if not one.startswith("^")]
            parts.append(_hash(node.op, *_attributes(node, self), *given))
        returned = [
            operand(definition.ret[argument.name]) for argument in definition.signature.output_arg
        ]
        return _hash(*parts, *returned)


def _attributes(node: Any, functions: _Functions) -> list[str]:
    found = []
    for name in sorted(node.attr):
        if name in _LEFT_OUT or (name.startswith("_") and not name.startswith("_tfdist")):
            continue
        value = node.attr[name]
        kind = value.WhichOneof("value")
        if kind == "func":
            text = functions.of(value.func.name)
        elif kind == "list" and value.list.func:
            text = " ".join(functions.of(one.name) for one in value.list.func)
        elif kind == "tensor":
            text = _constant(value.tensor)
        else:
            text = value.SerializeToString(deterministic=True).hex()
        found.append(f"{name}={text}")
    return found


def _constant(tensor: Any) -> str:
    """Returns a constant's value as text, or only the type and shape of a floating-point array.

    The values of such an array may differ between workers, because NumPy rounds differently on
    different CPUs.
    """
    dtype = tf.as_dtype(tensor.dtype)
    sizes = [dim.size for dim in tensor.tensor_shape.dim]
    if sizes and (dtype.is_floating or dtype.is_complex):
        return f"{dtype.name}{sizes}"
    return str(tensor.SerializeToString(deterministic=True).hex())


def _hash(*parts: str) -> str:
    return hashlib.blake2b("\0".join(parts).encode(), digest_size=8).hexdigest()


def describe(item: Any) -> str:
    """Describes an operation, or a tensor's producer, by its type and its line of user code."""
    op = item.op if isinstance(item, tf.Tensor) else item
    while op.type == "Identity":
        op = op.inputs[0].op
    return f"{op.type} ({where(op)})"


class StepFingerprints:
    """Fingerprints of the values that a step communicates, writes and returns.

    Args:
        communicated: the values that the step communicates. Each is a pair of a graph (of the step
            or of a function that it calls) and a tensor or operation of this graph.
        graph: the graph of the step.
        outputs: the results of the step.
        captured: as for `Fingerprints`.
        updates: whether to include the writes to variables. If so, all workers need the same
            writes.

    Attributes:
        values: the fingerprints of the communicated values, of the writes, and of the results.
    """

    def __init__(
        self,
        communicated: Sequence[tuple[Any, Any]],
        graph: Any,
        outputs: Sequence[Any],
        captured: Mapping[str, str],
        *,
        updates: bool,
    ) -> None:
        known = {id(graph): Fingerprints(graph, captured)}
        self.values, self._items = [], []
        for one, item in communicated:
            if id(one) not in known:
                known[id(one)] = Fingerprints(one)
            self.values.append(known[id(one)].of(item))
            self._items.append(item)
        self._graph, self._of_step = graph, known[id(graph)]
        others = [*(effects(graph) if updates else []), *outputs]
        self.values += map(self._of_step.of, others)
        self._items += others

    @property
    def operations(self) -> list[str]:
        """Fingerprints of all operations of the step, in order."""
        return [self._of_step.of(op) for op in self._graph.get_operations()]

    def describe_operation(self, number: int) -> str:
        """Describes the operation at an index of `operations`, by type and line of user code."""
        return describe(self._graph.get_operations()[number])

    def describe_value(self, number: int) -> str:
        """Describes the producer of the value at an index of `values`, as `describe` does."""
        return describe(self._items[number])
