"""Divides the preprocessing of a dataset among the workers.

A `map` processes each element separately. So it can follow the stages that determine the order of
the elements, such as `shuffle`, `repeat` and `batch`, instead of preceding them. Each worker then
reads all unprocessed elements, forms the batches from them, and processes only the elements of its
own rows. The batches stay the same, bit by bit.

This module changes the graph of a dataset in this way. The stages that read the changed graph are
in `csrc/tf/divided_dataset.cc`.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import tensorflow as tf
from tensorflow.core.framework import (
    attr_value_pb2,
    function_pb2,
    graph_pb2,
    node_def_pb2,
    tensor_shape_pb2,
    types_pb2,
)

from tfdist._src import native
from tfdist._src.data.dataset_graph import (
    graph_of,
    make_graph_deterministic,
    variant_from_graph,
    with_deterministic_option,
)
from tfdist._src.data.rows_of_functions import function_of_own_rows
from tfdist._src.internals import datasets
from tfdist._src.monitoring.training import record
from tfdist.errors import UnsupportedError

_numbers = itertools.count(1)

_MAPS = ("MapDataset", "ParallelMapDataset", "ParallelMapDatasetV2")
_BATCHES = ("BatchDatasetV2", "ParallelBatchDataset")
_PREFETCH = "PrefetchDataset"
_ZIP = "ZipDataset"

# Stages whose output elements are elements of their only input dataset, selected and ordered
# independently of the values of the elements.
_ORDERS = (
    "AssertCardinalityDataset",
    "AssertNextDataset",
    "FinalizeDataset",
    "MaxIntraOpParallelismDataset",
    "ModelDataset",
    "OptionsDataset",
    "PrivateThreadPoolDataset",
    "RepeatDataset",
    "ShardDataset",
    "ShuffleAndRepeatDataset",
    "ShuffleAndRepeatDatasetV2",
    "ShuffleDataset",
    "ShuffleDatasetV2",
    "ShuffleDatasetV3",
    "SkipDataset",
    "TakeDataset",
    _PREFETCH,
)

# Readers of files, whose elements are strings. They do not have an attribute with this type.
_READERS = ("TextLineDataset", "TFRecordDataset", "TFRecordDatasetV2", "FixedLengthRecordDataset")

_PYTHON = ("EagerPyFunc", "PyFunc", "PyFuncStateless")

# Stateful operations that change nothing, or whose order does not matter.
_READS = (
    "Assert",
    "If",
    "PartitionedCall",
    "Placeholder",
    "Print",
    "PrintV2",
    "StatefulPartitionedCall",
    "TensorListReserve",
    "VariableShape",
    "While",
)

# Operations that read variables and tables.
_RESOURCE_READS = (
    "LookupTableFind",
    "LookupTableFindV2",
    "LookupTableSize",
    "LookupTableSizeV2",
    "ReadVariableOp",
    "ResourceGather",
    "ResourceGatherNd",
)

# Operations that draw different random numbers in each call.
_DRAWS = (
    "Multinomial",
    "ParameterizedTruncatedNormal",
    "RandomCrop",
    "RandomGamma",
    "RandomPoisson",
    "RandomPoissonV2",
    "RandomShuffle",
    "RandomStandardNormal",
    "RandomUniform",
    "RandomUniformInt",
    "SampleDistortedBoundingBox",
    "SampleDistortedBoundingBoxV2",
    "TruncatedNormal",
)

Component = tuple[int, tensor_shape_pb2.TensorShapeProto]
"""The type and the shape of a component of an element."""


class _NotDivided(Exception):
    """A dataset cannot be divided. The message is the reason, as the end of a sentence."""


@dataclass(frozen=True)
class _Map:
    """A `map` that processes only this worker's rows.

    Attributes:
        node: the node of the map.
        start: the index of the first component that the map receives.
        before: all components of an element before the map.
        after: all components of an element after the map.
    """

    node: node_def_pb2.NodeDef
    start: int
    before: tuple[Component, ...]
    after: tuple[Component, ...]

    def moved(self, left: tuple[Component, ...], right: tuple[Component, ...]) -> "_Map":
        """Returns this map for elements with additional components on both sides."""
        return _Map(
            self.node,
            len(left) + self.start,
            (*left, *self.before, *right),
            (*left, *self.after, *right),
        )


class Plan(NamedTuple):
    """A changed graph of a dataset.

    Attributes:
        graph: the graph, with the additional nodes.
        batches: the node that yields batches of unprocessed elements.
        stages: the node that processes the elements of this worker's rows.
        draws: whether the maps draw different random numbers each time.
        drawn: the indices of the components of a batch that depend on these numbers.
        is_exact: whether the results are equal bit by bit. The results of maps of batches may have
            other rounding errors.
        calls_python: whether the maps call Python functions.
    """

    graph: graph_pb2.GraphDef
    batches: str
    stages: str
    draws: bool
    drawn: frozenset[int]
    is_exact: bool
    calls_python: bool


def plan_division(
    graph: graph_pb2.GraphDef, last: str, *, always: bool = False, worker: int = 0
) -> Plan | str:
    """Moves the maps in a dataset's graph behind the division of the batches.

    Args:
        graph: the graph of the dataset.
        last: the name of the last node of the dataset.
        always: whether to also divide maps that call Python functions, and maps of batches that
            seem to combine rows.
        worker: a number that only this worker has. On each worker, random operations in the maps
            draw other numbers.

    Returns:
        The changed graph, or the reason why the dataset cannot be divided, as the end of a
        sentence.
    """
    try:
        return _Planner(graph, always=always).plan(last, worker)
    except _NotDivided as reason:
        return str(reason)


class _Planner:
    def __init__(self, graph: graph_pb2.GraphDef, *, always: bool) -> None:
        self._graph = graph_pb2.GraphDef()
        self._graph.CopyFrom(graph)
        self._nodes = {node.name: node for node in self._graph.node}
        self._functions = {
            function.signature.name: function for function in self._graph.library.function
        }
        make_graph_deterministic(self._graph)
        self._always = always
        self._draws = self._calls_python = False
        for node in self._nodes.values():
            if node.op.startswith("Shuffle"):
                self._check_seed(node)
        # Whether any function of the dataset may change a variable or a table.
        self._has_writes = any(
            self._is_write(node.op)
            for function in self._graph.library.function
            for node in function.node_def
        )

    def plan(self, last: str, worker: int) -> Plan:
        later: list[node_def_pb2.NodeDef | None] = []
        batch_maps, node = [], self._nodes[last]
        ahead = 1
        while node.op not in _BATCHES:
            if node.op in _MAPS:
                batch_maps.append(node)
            elif node.op not in _ORDERS:
                raise _NotDivided(f"{_described(node.op)} follows `batch`")
            elif node.op == _PREFETCH:
                size = self._number(node.input[1])
                ahead = size if size < 0 else max(ahead, size)
            if node.op == _PREFETCH or (node.op in _MAPS and not self._is_identity(node)):
                later.append(None)  # a place where a stage is removed
            elif node.op not in _MAPS:
                later.append(node)
            node = self._input(node)
        size, drops = self._number(node.input[1]), bool(self._number(node.input[-1]))
        source, maps = self._without_maps(self._input(node))
        if not maps and not batch_maps:
            raise _NotDivided("it has no `map` that could process rows separately")
        unprocessed = maps[0].before if maps else self._components(self._nodes[source])
        processed = maps[-1].after if maps else unprocessed
        if any(kind == types_pb2.DT_VARIANT for kind, _ in (*unprocessed, *processed)):
            raise _NotDivided("its elements contain tensors that are not dense")
        batches = self._add(
            "TfdistElementBatches",
            [source],
            components=_ONE_VARIANT,
            batch_size=attr_value_pb2.AttrValue(i=size),
            drop_remainder=attr_value_pb2.AttrValue(b=drops),
        )
        for stage in reversed(later):
            if stage is None:
                batches = self._separated(batches)
            else:
                batches = self._copied(stage, [batches], _ONE_VARIANT)
        stages = self._add("TfdistOwnElements", [], components=unprocessed)
        for one in maps:
            stages = self._applied(one, stages, worker)
        rows = (*_SHARE, *((kind, _with_rows(shape)) for kind, shape in processed))
        stages = self._add("TfdistCollate", [stages], components=rows)
        for batch_map in reversed(batch_maps):
            rows = (*_SHARE, *(_any_rows(one) for one in self._components(batch_map)))
            stages = self._applied_to_batches(batch_map, stages, rows, worker)
        stages = self._add(_PREFETCH, [stages, self._constant(ahead)], components=rows)
        return Plan(
            self._graph,
            batches,
            stages,
            self._draws,
            self._drawn(maps, batch_maps),
            is_exact=not batch_maps,
            calls_python=self._calls_python,
        )

    def _without_maps(self, node: node_def_pb2.NodeDef) -> tuple[str, list[_Map]]:
        """Returns a dataset without those of its maps that can be moved, and these maps."""
        if node.op in _MAPS:
            if not self._is_movable(node):
                return node.name, []
            source, maps = self._without_maps(self._input(node))
            before = maps[-1].after if maps else self._components(self._nodes[source])
            captured = len(node.attr["Targuments"].list.type)
            function = self._functions[node.attr["f"].func.name]
            arguments = function.signature.input_arg
            if len(arguments) - captured != len(before):
                return node.name, []
            if not self._is_identity(node):
                source = self._separated(source)
            return source, [*maps, _Map(node, 0, before, self._components(node))]
        if node.op == _ZIP:
            return self._zip_without_maps(node)
        if node.op not in _ORDERS:
            return node.name, []
        source, maps = self._without_maps(self._input(node))
        if not maps:
            return node.name, []
        return self._copied(node, [source], maps[0].before), maps

    def _separated(self, source: str) -> str:
        """Keeps a shuffle apart from the stage that follows it after a stage was removed.

        If `repeat` directly follows a shuffle, TensorFlow combines them into one stage, which draws
        another order.
        """
        node = self._nodes[source]
        if not node.op.startswith("Shuffle"):
            return source
        options = attr_value_pb2.AttrValue(s=b"")
        return self._add(
            "OptionsDataset",
            [source],
            components=self._components(node),
            serialized_options=options,
        )

    def _is_identity(self, node: node_def_pb2.NodeDef) -> bool:
        """Whether a map returns its arguments, so that TensorFlow's optimizer removes it."""
        definition = self._functions[node.attr["f"].func.name]
        if node.attr["Targuments"].list.type or definition.signature.is_stateful:
            return False
        values = {one.name: one.name for one in definition.signature.input_arg}
        for one in definition.node_def:
            if one.op != "Identity":
                return False
            values[f"{one.name}:output:0"] = one.input[0]
        arguments = [one.name for one in definition.signature.input_arg]
        results = []
        for result in definition.signature.output_arg:
            name = definition.ret[result.name]
            while values.get(name, name) != name:
                name = values[name]
            results.append(name)
        return results == arguments

    def _zip_without_maps(self, node: node_def_pb2.NodeDef) -> tuple[str, list[_Map]]:
        inputs = [self._nodes[_plain(name)] for name in node.input if not name.startswith("^")]
        parts = [self._without_maps(one) for one in inputs]
        if not any(maps for _, maps in parts):
            return node.name, []
        befores, afters = [], []
        for source, maps in parts:
            before = maps[0].before if maps else self._components(self._nodes[source])
            befores.append(before)
            afters.append(maps[-1].after if maps else before)
        all_maps = []
        for i, (_, maps) in enumerate(parts):
            left = tuple(itertools.chain(*afters[:i]))
            right = tuple(itertools.chain(*befores[i + 1 :]))
            all_maps += [one.moved(left, right) for one in maps]
        unprocessed = tuple(itertools.chain(*befores))
        return self._copied(node, [source for source, _ in parts], unprocessed), all_maps

    def _is_movable(self, node: node_def_pb2.NodeDef) -> bool:
        operations = set(self._operations(node.attr["f"].func.name, set()))
        # In a sequential map, these operations draw the same numbers in each run.
        is_sequential = node.op == "MapDataset" and not self._always
        if is_sequential and not operations.isdisjoint(_DRAWS):
            return False
        return self._are_movable(operations)

    def _are_movable(self, operations: set[str]) -> bool:
        """Whether a function with these operations may be called for some rows only, and later."""
        if not self._always and not operations.isdisjoint(_PYTHON):
            return False
        if any(map(self._is_write, operations)):
            return False
        if self._has_writes and not operations.isdisjoint(_RESOURCE_READS):
            return False
        self._draws |= not operations.isdisjoint(_DRAWS)
        self._calls_python |= not operations.isdisjoint(_PYTHON)
        return True

    def _is_write(self, operation: str) -> bool:
        """Whether an operation may change state that other operations read."""
        if operation in (*_READS, *_RESOURCE_READS, *_DRAWS, *_PYTHON) or "Dataset" in operation:
            return False
        return operation not in self._functions and datasets.is_stateful(operation)

    def _operations(self, function: str, seen: set[str]) -> Iterator[str]:
        """Yields the types of the operations in a function and in the functions that it calls."""
        if function in seen:
            return
        seen.add(function)
        definition = self._functions.get(function)
        if definition is None:
            yield "an unknown function"
            return
        for node in definition.node_def:
            if node.op in self._functions:
                yield from self._operations(node.op, seen)
                continue
            yield node.op
            for name in _called(node):
                yield from self._operations(name, seen)

    def _drawn(
        self, maps: Sequence[_Map], batch_maps: Sequence[node_def_pb2.NodeDef]
    ) -> frozenset[int]:
        """Returns the components of a batch that depend on random numbers."""
        drawn: set[int] = set()
        for one in maps:
            shift = len(one.after) - len(one.before)
            function = one.node.attr["f"].func.name
            results_count = len(self._functions[function].signature.output_arg)
            stop = one.start + results_count - shift  # the end of what the map receives
            received = {i - one.start for i in drawn if one.start <= i < stop}
            results = self._drawn_results(function, received)
            drawn = {
                *(i for i in drawn if i < one.start),
                *(i + one.start for i in results),
                *(i + shift for i in drawn if i >= stop),
            }
        for node in reversed(batch_maps):
            drawn = self._drawn_results(node.attr["f"].func.name, drawn)
        return frozenset(drawn)

    def _drawn_results(self, name: str, drawn: set[int]) -> set[int]:
        """Returns the results of a function that depend on random numbers.

        Args:
            name: the name of the function.
            drawn: the indices of the arguments that depend on random numbers.
        """
        definition = self._functions[name]
        arguments = [argument.name for argument in definition.signature.input_arg]
        found = {argument for i, argument in enumerate(arguments) if i in drawn}

        def depends(value: str) -> bool:
            return value in found or value.partition(":")[0] in found

        before = -1
        while len(found) > before:  # The nodes are in any order.
            before = len(found)
            for node in definition.node_def:
                inputs = [value for value in node.input if not value.startswith("^")]
                given = {i for i, value in enumerate(inputs) if depends(value)}
                called = node.op if node.op in self._functions else ""
                if node.op in ("PartitionedCall", "StatefulPartitionedCall"):
                    called = node.attr["f"].func.name
                if called in self._functions:
                    results = self._drawn_results(called, given)
                    signature = self._functions[called].signature
                    names = [f"output:{i}" for i in range(len(signature.output_arg))]
                    if node.op == called:
                        names = [f"{result.name}:0" for result in signature.output_arg]
                    found.update(f"{node.name}:{names[i]}" for i in results)
                elif given or not self._operations_of(node).isdisjoint(_DRAWS):
                    found.add(node.name)
        values = [definition.ret[result.name] for result in definition.signature.output_arg]
        return {i for i, value in enumerate(values) if depends(value)}

    def _operations_of(self, node: node_def_pb2.NodeDef) -> set[str]:
        seen: set[str] = set()
        inner = {op for name in _called(node) for op in self._operations(name, seen)}
        return {node.op, *inner}

    def _applied(self, one: _Map, source: str, worker: int) -> str:
        """Adds a map of this worker's rows, and returns the name of its node."""
        node = self._copied(one.node, [source], one.after)
        added = self._nodes[node]
        name = added.attr["f"].func.name
        if worker:
            name = self._with_other_draws(name, worker)
        arguments = self._functions[name].signature.input_arg
        captured = len(added.attr["Targuments"].list.type)
        if len(arguments) - captured < len(one.before):
            name = self._on_part(name, one, captured)
        self._set_function(added, name)
        return node

    def _applied_to_batches(
        self, node: node_def_pb2.NodeDef, source: str, components: Sequence[Component], worker: int
    ) -> str:
        """Adds a map of this worker's rows of batches, and returns the name of its node."""
        name = node.attr["f"].func.name
        if not self._are_movable(set(self._operations(name, set()))):
            raise _NotDivided("a `map` after `batch` has state, or calls Python")
        shapes = [tf.TensorShape(shape) for _, shape in self._components(self._input(node))]
        captured = len(node.attr["Targuments"].list.type)
        try:
            found = function_of_own_rows(self._functions[name], shapes, captured)
        except (NotImplementedError, UnsupportedError) as error:
            raise _NotDivided(f"a `map` after `batch` cannot be analyzed ({error})") from error
        if found is None and not self._always:
            raise _NotDivided("a `map` after `batch` combines rows")
        if found is None:
            name = self._with_other_draws(name, worker) if worker else name
            before = (*_SHARE, *self._components(self._input(node)))
            own = self._on_part(name, _Map(node, len(_SHARE), before, tuple(components)), captured)
        else:
            function, called = found
            own = function.signature.name
            for one in (function, *called):
                if one.signature.name not in self._functions:
                    self._add_function(one)
        copy = self._copied(node, [source], components)
        self._set_function(self._nodes[copy], own)
        return copy

    @staticmethod
    def _set_function(node: node_def_pb2.NodeDef, name: str) -> None:
        """Makes a map apply another function, and yield one result per element."""
        node.attr["f"].func.name = name
        if "preserve_cardinality" in node.attr:
            node.attr["preserve_cardinality"].b = True

    def _on_part(self, name: str, one: _Map, captured: int) -> str:
        """Adds a function that applies another one to some components, and returns its name."""
        inner = self._functions[name].signature
        own = len(inner.input_arg) - captured
        function = function_pb2.FunctionDef()
        signature = function.signature
        signature.name = f"{name}_on_part_{next(_numbers)}"
        signature.is_stateful = inner.is_stateful
        for i, (kind, _) in enumerate(one.before):
            signature.input_arg.add(name=f"component_{i}", type=kind)
        for i, argument in enumerate(inner.input_arg[own:]):
            signature.input_arg.add(name=f"captured_{i}", type=argument.type)
        inputs = [f"component_{one.start + i}" for i in range(own)]
        inputs += [f"captured_{i}" for i in range(captured)]
        call = function.node_def.add(
            name="call",
            op="StatefulPartitionedCall" if inner.is_stateful else "PartitionedCall",
            input=inputs,
        )
        call.attr["f"].func.name = name
        call.attr["Tin"].list.type.extend(argument.type for argument in inner.input_arg)
        call.attr["Tout"].list.type.extend(result.type for result in inner.output_arg)
        results = len(inner.output_arg)
        shift = len(one.before) - len(one.after)
        for i, (kind, _) in enumerate(one.after):
            signature.output_arg.add(name=f"result_{i}", type=kind)
            if one.start <= i < one.start + results:
                function.ret[f"result_{i}"] = f"call:output:{i - one.start}"
            else:
                origin = i if i < one.start else i + shift
                function.ret[f"result_{i}"] = f"component_{origin}"
        self._add_function(function)
        return str(signature.name)

    def _with_other_draws(self, name: str, worker: int) -> str:
        """Returns the name of a function whose random operations have other seeds per worker."""
        definition = self._functions[name]
        changed = {}
        for node in definition.node_def:
            called = [node.op] if node.op in self._functions else _called(node)
            for one in called:
                other = self._with_other_draws(one, worker)
                if other != one:
                    changed[one] = other
        if not changed and not any(node.op in _DRAWS for node in definition.node_def):
            return name
        function = function_pb2.FunctionDef()
        function.CopyFrom(definition)
        function.signature.name = f"{name}_on_worker_{worker}_{next(_numbers)}"
        for node in function.node_def:
            node.op = changed.get(node.op, node.op)
            for attribute in node.attr.values():
                for call in (attribute.func, *attribute.list.func):
                    if call.name in changed:
                        call.name = changed[call.name]
            # Without seeds, an operation draws different numbers on each worker anyway.
            if node.op in _DRAWS and (node.attr["seed"].i or node.attr["seed2"].i):
                node.attr["seed2"].i = (node.attr["seed2"].i + 1_000_003 * worker) % 2**62
        self._add_function(function)
        return str(function.signature.name)

    def _add_function(self, function: function_pb2.FunctionDef) -> None:
        self._graph.library.function.add().CopyFrom(function)
        self._functions[function.signature.name] = function

    def _copied(
        self,
        node: node_def_pb2.NodeDef,
        sources: Sequence[str],
        components: Sequence[Component],
    ) -> str:
        """Adds a copy of a node with other input datasets, and returns its name."""
        copy = self._graph.node.add()
        copy.CopyFrom(node)
        copy.name = f"{node.name}/divided_{next(_numbers)}"
        copy.input[: len(sources)] = list(sources)
        self._set_components(copy, components)
        self._nodes[copy.name] = copy
        return str(copy.name)

    def _add(
        self,
        operation: str,
        inputs: Sequence[str],
        *,
        components: Sequence[Component],
        **attributes: attr_value_pb2.AttrValue,
    ) -> str:
        node = self._graph.node.add(
            name=f"{operation}/divided_{next(_numbers)}", op=operation, input=inputs
        )
        for name, value in attributes.items():
            node.attr[name].CopyFrom(value)
        self._set_components(node, components)
        self._nodes[node.name] = node
        return str(node.name)

    def _constant(self, value: int) -> str:
        node = self._graph.node.add(name=f"Const/divided_{next(_numbers)}", op="Const")
        node.attr["dtype"].type = types_pb2.DT_INT64
        node.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(value, tf.int64))
        self._nodes[node.name] = node
        return str(node.name)

    @staticmethod
    def _set_components(node: node_def_pb2.NodeDef, components: Sequence[Component]) -> None:
        types, shapes = node.attr["output_types"].list, node.attr["output_shapes"].list
        del types.type[:]
        del shapes.shape[:]
        types.type.extend(kind for kind, _ in components)
        shapes.shape.extend(shape for _, shape in components)

    @staticmethod
    def _components(node: node_def_pb2.NodeDef) -> tuple[Component, ...]:
        if node.op in _READERS:
            return ((types_pb2.DT_STRING, tensor_shape_pb2.TensorShapeProto()),)
        types = node.attr["output_types" if "output_types" in node.attr else "Toutput_types"]
        shapes = node.attr["output_shapes"].list.shape
        if not types.list.type or len(types.list.type) != len(shapes):
            raise _NotDivided(f"the types of {_described(node.op)} are unknown")
        return tuple(zip(types.list.type, shapes, strict=True))

    def _input(self, node: node_def_pb2.NodeDef) -> node_def_pb2.NodeDef:
        return self._nodes[_plain(node.input[0])]

    def _check_seed(self, node: node_def_pb2.NodeDef) -> None:
        # Without a seed, the first two numbers after the buffer size are zero.
        seeds = [self._nodes[_plain(name)] for name in node.input[2:4]]
        known = len(seeds) == 2 and all(one.op == "Const" for one in seeds)
        if known and not any(self._number(one.name) for one in seeds):
            raise _NotDivided("it shuffles without a seed")

    def _number(self, name: str) -> int:
        node = self._nodes[_plain(name)]
        if node.op != "Const":
            raise _NotDivided("the size of a batch is unknown")
        return int(tf.make_ndarray(node.attr["value"].tensor))


# The number of rows of the whole batch, and the index of this worker's first row. They precede the
# components of this worker's rows.
_SHARE = ((types_pb2.DT_INT32, tensor_shape_pb2.TensorShapeProto()),) * 2
_ONE_VARIANT = ((types_pb2.DT_VARIANT, tensor_shape_pb2.TensorShapeProto()),)


def _plain(name: str) -> str:
    return name.partition(":")[0]


def _called(node: node_def_pb2.NodeDef) -> list[str]:
    """Returns the names of the functions that a node calls."""
    names = []
    for attribute in node.attr.values():
        names += [call.name for call in (attribute.func, *attribute.list.func) if call.name]
    return names


def _with_rows(shape: tensor_shape_pb2.TensorShapeProto) -> tensor_shape_pb2.TensorShapeProto:
    """Returns the shape of a stack of tensors."""
    if shape.unknown_rank:
        return shape
    stacked = tensor_shape_pb2.TensorShapeProto()
    stacked.dim.add(size=-1)
    stacked.dim.extend(shape.dim)
    return stacked


def _any_rows(component: Component) -> Component:
    """Returns a component with any number of rows."""
    kind, shape = component
    changed = tensor_shape_pb2.TensorShapeProto()
    changed.CopyFrom(shape)
    if changed.dim:
        changed.dim[0].size = -1
    return kind, changed


def _described(operation: str) -> str:
    name = operation.removesuffix("V2").removesuffix("V3").removesuffix("Dataset")
    return f"the stage {name}"


class Report(NamedTuple):
    """What a division has done so far on this worker.

    Attributes:
        rows: the number of rows of the batches that were read.
        processed: the number of elements that this worker has processed.
        differing: the index of the first component that depends on which rows a worker processes;
            -1 if there is none.
        is_whole: whether this worker processes all rows of each batch.
    """

    rows: int
    processed: int
    differing: int
    is_whole: bool


class Division:
    """The division of a dataset's preprocessing among the workers.

    Args:
        dataset: the dataset, with global batches.
        plan: its changed graph.
        inputs: the values of the placeholders in the graph.

    Attributes:
        number: the number that identifies the division in this process.
        is_exact: see `Plan`.
        draws: see `Plan`.
        drawn: see `Plan`.
        calls_python: see `Plan`.
    """

    def __init__(self, dataset: Any, plan: Plan, inputs: Any) -> None:
        self.number = next(_numbers)
        self.is_exact, self.calls_python = plan.is_exact, plan.calls_python
        self.draws, self.drawn = plan.draws, plan.drawn
        self._dataset, self._plan, self._inputs = dataset, plan, inputs
        self._variant: Any = None  # keeps the state alive that `report` reads
        record.preprocessing = _preprocessed_so_far

    def shares(self, element_spec: Any, **attributes: Any) -> Any:
        """Returns a dataset of each replica's rows.

        Args:
            element_spec: the structure of an element.
            attributes: the attributes of the op `TfdistDividedDataset`, without `division`,
                `checks`, `is_exact` and the types.
        """
        graph = graph_pb2.GraphDef()
        graph.CopyFrom(self._plan.graph)
        node = graph.node.add(
            name="divided_dataset",
            op="TfdistDividedDataset",
            input=[self._plan.batches, self._plan.stages],
        )
        # If the maps draw random numbers, they give other results each time.
        attributes |= {
            "division": self.number,
            "checks": not self._plan.draws,
            "is_exact": self._plan.is_exact,
        }
        for name, value in attributes.items():
            if isinstance(value, bool):
                node.attr[name].b = value
            elif isinstance(value, int):
                node.attr[name].i = value
            else:
                node.attr[name].s = value.encode()
        types = [kind.as_datatype_enum for kind in datasets.flat_types(element_spec)]
        shapes = [shape.as_proto() for shape in datasets.flat_shapes(element_spec)]
        node.attr["output_types"].list.type.extend(types)
        node.attr["output_shapes"].list.shape.extend(shapes)
        self._variant = variant_from_graph(graph, node.name, self._inputs)
        return datasets.dataset_with_graph(self._dataset, self._variant, element_spec)

    def take_first_batch(self) -> list[tf.Tensor]:
        """Returns all rows of the first batch of the last iterator, by component.

        Raises:
            tf.errors.FailedPreconditionError: no iterator has read a first batch since the last
                call.
        """
        types = datasets.flat_types(self._dataset.element_spec)
        return list(native.load_ops().tfdist_take_first_batch(division=self.number, T=types))

    def report(self) -> Report:
        """Returns the numbers of rows that were read and processed so far."""
        rows, processed, differing, whole = (
            native.load_ops().tfdist_division_report(division=self.number).numpy().tolist()
        )
        return Report(rows, processed, differing, bool(whole))

    def process_whole(self) -> None:
        """Makes this worker process all rows of each batch from now on."""
        native.load_ops().tfdist_process_whole(division=self.number)


def _preprocessed_so_far() -> tuple[int, int]:
    """Returns the rows read and the elements processed by all divisions of this process."""
    rows, processed, *_ = native.load_ops().tfdist_division_report(division=0).numpy().tolist()
    return rows, processed


def divide(dataset: Any, *, always: bool = False, worker: int = 0) -> Division | str:
    """Divides the preprocessing of a dataset, if its maps allow it.

    Args:
        dataset: a dataset of global batches.
        always: whether to also divide maps that call Python functions, and maps of batches that
            seem to combine rows.
        worker: this worker's position among the workers, or another number that only this worker
            has.

    Returns:
        The division, or the reason why there is none, as the end of a sentence.
    """
    specs = tf.nest.flatten(dataset.element_spec)
    if not all(isinstance(spec, tf.TensorSpec) for spec in specs):
        return "its batches contain tensors that are not dense"
    dataset = with_deterministic_option(dataset)
    try:
        graph, node, inputs = graph_of(dataset)
    except tf.errors.ResourceExhaustedError:
        return "the constants in its graph are too large"
    plan = plan_division(graph, node, always=always, worker=worker)
    return plan if isinstance(plan, str) else Division(dataset, plan, inputs)
