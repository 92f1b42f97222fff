"""Atomic steps: the number of committed steps, and the variables that a step writes.

A step can fail as long as it communicates. The optimizer adds an operation, `UPDATE`, after which
it updates variables. If the graph shows that all communication ends before this operation, the
operation is the step's commit point, and later writes need no copies. If variables may be written
earlier, their values are copied, and restored if the step fails. This is always correct, but
slower. The commit point is found in the finished graph, so code that builds a graph need not
guarantee that there is one.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter
from typing import Any

from tfdist._src.comm import tokens
from tfdist._src.xla.program import called_by

# The committed steps of this process that Python has counted, under all strategies.
_counted = 0


class Progress:
    """The number of training steps that this worker has committed.

    A step is committed when all its communication has ended and all variables have been updated. If
    the step fails earlier, all variables are restored to their values before the step. After an
    error in `fit`, the model, the optimizer and the metrics therefore have the state after
    `committed_steps` steps.

    Steps of `fit` and `train_on_batch` are counted, but not steps of loops that call
    `strategy.run`.

    Attributes:
        torn: whether a step has failed while it updated variables, so that the state matches no
            step. Only a local error of this worker can cause this, such as lack of memory.
        redoable: whether to keep the worker-local writes of a step that is rolled back. They are
            kept for `redo`, because other workers may have committed the step.
    """

    def __init__(self) -> None:
        self._committed_steps = 0
        self.torn = False
        self.redoable = False
        self._undone = False

    @property
    def committed_steps(self) -> int:
        """The number of committed steps; exact while no step is running."""
        return self._committed_steps

    @property
    def has_undone(self) -> bool:
        """Whether the step after the last committed step was rolled back, and can be redone."""
        return self._undone

    def redo(self) -> None:
        """Redoes the writes that a rolled-back step made before its last communication.

        This is correct for worker-local state if another worker has committed the step. All other
        state must be received from that worker. Call `restore` when this state has been received.
        """
        tokens.redo()
        self._undone = False

    def restore(self, committed_steps: int) -> None:
        """Declares that this worker now has the whole state after a number of steps."""
        self._committed_steps = committed_steps
        self.torn = self._undone = False

    def add(self, steps: int, *, logged: bool) -> None:
        """Counts steps that have succeeded.

        Args:
            steps: the number of steps.
            logged: whether the steps ran inside `undoing`.
        """
        global _counted
        self._committed_steps += steps
        _counted += steps if logged else 0

    @contextlib.contextmanager
    def undoing(self) -> Iterator[None]:
        """Rolls back a step that fails within this context, and counts the earlier steps."""
        try:
            yield
        except BaseException:
            committed, whole = tokens.roll_back(redoable=self.redoable)
            self.torn |= not whole
            self.add(committed - _counted, logged=True)
            self._undone = self.redoable
            raise


UPDATE = "TfdistUpdateBegins"

# Operations that take the resource of a variable, table or summary writer, but write no variables.
READS = frozenset(
    {
        "DisableCopyOnRead",
        "FlushSummaryWriter",
        "Identity",
        "LookupTableExportV2",
        "LookupTableFindV2",
        "LookupTableSizeV2",
        "ReadVariableOp",
        "ResourceGather",
        "ResourceGatherNd",
        "VarIsInitializedOp",
        "VariableShape",
        "WriteAudioSummary",
        "WriteGraphSummary",
        "WriteHistogramSummary",
        "WriteImageSummary",
        "WriteRawProtoSummary",
        "WriteScalarSummary",
        "WriteSummary",
        UPDATE,
    }
)
_LOOPS = ("While", "StatelessWhile")
# Maps the types of operations that call functions to the number of inputs that precede the
# functions' arguments.
_CALLS = {
    **dict.fromkeys(("PartitionedCall", "StatefulPartitionedCall", *_LOOPS), 0),
    **dict.fromkeys(("If", "StatelessIf", "Case", "StatelessCase"), 1),
}
# tfdist's operations that neither communicate nor write variables.
_MARKS = (
    "TfdistReady",
    "TfdistInput",
    "TfdistSpan",
    "TfdistStep",
    "TfdistGroupShape",
    "TfdistShapesFit",
)
# tfdist's operations that do not communicate. All other operations of tfdist have a token as their
# first input, not a variable.
_LOCAL = (*_MARKS, UPDATE, "TfdistKeep", "TfdistSelect", "TfdistScatter")
_RESOURCE = 20  # tf.resource.as_datatype_enum


@dataclass(frozen=True)
class GraphWrites:
    """The variables that a graph writes.

    Attributes:
        kept: the names of the graph's inputs for variables that may be written before the commit
            point. The values of these variables must be copied.
        gated: whether the graph also writes other variables, always after the commit point.
    """

    kept: frozenset[str]
    gated: bool


@dataclass
class _Summary:
    """The properties of a graph or function.

    Attributes:
        communicates: whether any of its operations communicates.
        announces: whether it contains an `UPDATE` operation.
        updates: whether it runs an `UPDATE` operation in any case.
        unsure: whether communication may follow an `UPDATE`.
        writes: for each written resource, whether all writes follow an `UPDATE`.
    """

    communicates: bool = False
    announces: bool = False
    updates: bool = False
    unsure: bool = False
    writes: dict[str, bool] = field(default_factory=dict)


@dataclass(frozen=True)
class _Called:
    """A function that an operation calls, and the names of its resource arguments by index."""

    summary: _Summary
    resources: Mapping[int, str]


def find_writes(graph: Any) -> GraphWrites:
    """Determines the variables that a step's graph writes, before and after its commit point.

    Args:
        graph: the step's `GraphDef`, including its functions; its inputs are placeholders.
    """
    functions = {f.signature.name: f for f in graph.library.function}

    @functools.cache
    def call(name: str) -> _Called:
        arguments = enumerate(functions[name].signature.input_arg)
        resources = {i: a.name for i, a in arguments if a.type == _RESOURCE}
        nodes = list(functions[name].node_def)
        return _Called(_summarize(nodes, list(resources.values()), call), resources)

    placeholders = [n for n in graph.node if n.op == "Placeholder"]
    resources = [n.name for n in placeholders if n.attr["dtype"].type == _RESOURCE]
    try:
        found = _summarize(list(graph.node), resources, call)
    except (CycleError, KeyError, RecursionError):  # The form of the graph is not supported.
        return GraphWrites(frozenset(resources), gated=False)
    gated = [r for r, behind in found.writes.items() if behind and not found.unsure]
    return GraphWrites(frozenset(found.writes) - set(gated), gated=bool(gated))


def _summarize(
    nodes: Sequence[Any], resources: Sequence[str], call: Callable[[str], _Called]
) -> _Summary:
    result = _Summary()
    origins = {name: name for name in resources}
    called = {n.name: [call(f) for f in called_by(n)] for n in nodes}
    speaking = [n.name for n in nodes if _speaks(n, called[n.name])]
    bits = {name: 1 << i for i, name in enumerate(speaking)}
    heard: dict[str, int] = {}  # the communication (as bits) that ends before an operation does
    behind: dict[str, bool] = {}  # whether an operation waits for an UPDATE operation
    for node, sources in _in_order(nodes):
        before = functools.reduce(int.__or__, (heard[s] for s in sources), 0)
        heard[node.name] = before | bits.get(node.name, 0)
        last = heard[node.name] == (1 << len(speaking)) - 1
        after = any(behind[s] for s in sources)
        summaries = [c.summary for c in called[node.name]]
        always = node.op in _CALLS and node.op not in _LOOPS
        updates = node.op == UPDATE or (always and all(s.updates for s in summaries))
        announces = node.op == UPDATE or any(s.announces for s in summaries)
        behind[node.name] = after or updates
        result.updates |= updates
        result.announces |= announces
        result.unsure |= announces and (not last or node.op in _LOOPS)
        result.unsure |= any(s.unsure for s in summaries)
        held = _held(node, origins)
        if node.op == "Identity" and held:
            origins[node.name] = held[0]
        for resource, within in _written(node, held, called[node.name]):
            result.writes[resource] = (after or within) and result.writes.get(resource, True)
    result.communicates = bool(speaking)
    return result


def _speaks(node: Any, called: Sequence[_Called]) -> bool:
    ours = node.op.startswith("Tfdist") and not node.op.startswith(_LOCAL)
    return ours or node.op.startswith("Collective") or any(c.summary.communicates for c in called)


def _written(
    node: Any, held: Mapping[int, str], called: Sequence[_Called]
) -> Iterator[tuple[str, bool]]:
    """Yields the resources that an operation writes.

    With each resource, yields whether all writes follow an `UPDATE` in the functions that the
    operation calls.
    """
    if node.op in _CALLS:
        for function in called:
            for argument, name in function.resources.items():
                resource = held.get(argument + _CALLS[node.op])
                if resource is not None and name in function.summary.writes:
                    yield resource, function.summary.writes[name]
    elif node.op not in READS and not node.op.startswith(_MARKS):
        has_token = node.op.startswith("Tfdist") and not node.op.startswith(_LOCAL)
        yield from ((name, False) for i, name in held.items() if i > 0 or not has_token)


def _held(node: Any, origins: Mapping[str, str]) -> dict[int, str]:
    """Returns the resources among an operation's inputs, by the index of the input."""
    inputs = (i.partition(":")[0] for i in node.input if not i.startswith("^"))
    return {i: origins[name] for i, name in enumerate(inputs) if name in origins}


def _in_order(nodes: Sequence[Any]) -> Iterator[tuple[Any, list[str]]]:
    """Yields the operations in topological order, each with the names of its sources."""
    by_name = {node.name: node for node in nodes}
    sources = {
        node.name: [s for s in (_source(i) for i in node.input) if s in by_name] for node in nodes
    }
    for name in TopologicalSorter(sources).static_order():
        yield by_name[name], sources[name]


def _source(given: str) -> str:
    return given.removeprefix("^").partition(":")[0]
