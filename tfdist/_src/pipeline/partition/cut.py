"""Cuts a model's calls into stages, and finds the values that pass between them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from itertools import pairwise

import keras

from tfdist._src.pipeline.partition.graph import Graph, Key
from tfdist._src.pipeline.partition.stage import Stage, unique
from tfdist.errors import PartitionError


@dataclasses.dataclass(frozen=True)
class Edge:
    """The values that one stage produces and a later one, not necessarily the next, consumes.

    Attributes:
        source, target: the indices of the stages.
        keys: the values, in order.
        masked: those that carry a Keras mask.
        differentiable: those whose gradient flows back: the floating-point ones.
    """

    source: int
    target: int
    keys: tuple[Key, ...]
    masked: tuple[Key, ...]
    differentiable: tuple[Key, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class SharedVariable:
    """A variable that several stages use: a layer called in each, tied embeddings.

    Attributes:
        variable: the variable.
        stages: their indices, in order; the first is the owner, which applies the regularizer.
    """

    variable: keras.Variable
    stages: tuple[int, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class Partition:
    """A model divided into stages.

    Attributes:
        graph: the model's calls.
        boundaries: the index of the first call of each stage but the first.
        stages: the stages.
        edges: the values passed between any two of them, sorted by source and target. A model
            output produced before the last stage is passed to the last stage.
        shared: the variables that several stages use, in the order of their owners.
        seconds: the time of each call if the stages were chosen by it, else None.
    """

    graph: Graph
    boundaries: tuple[int, ...]
    stages: tuple[Stage, ...]
    edges: tuple[Edge, ...]
    shared: tuple[SharedVariable, ...]
    seconds: tuple[float, ...] | None = None

    def where(self, key: Key) -> int | None:
        """The stage that produces a value; None for the model's inputs."""
        return self._makers.get(key)

    def model_inputs(self, stage: int) -> tuple[Key, ...]:
        """The model's inputs that a stage consumes."""
        return tuple(key for key in self.stages[stage].inputs if key in self.graph.inputs)

    @functools.cached_property
    def _makers(self) -> dict[Key, int]:
        return {
            key: stage.index
            for stage in self.stages
            for call in stage.calls
            for key in call.outputs
        }


def cut(
    graph: Graph, boundaries: Sequence[int], seconds: Sequence[float] | None = None
) -> Partition:
    """Cuts a model before some of its calls.

    Args:
        graph: the model.
        boundaries: the index of the first call of each stage but the first, increasing.
        seconds: the time of each call, if known.

    Returns:
        The stages and the values that pass between them.

    Raises:
        PartitionError: a stage would have no calls.
    """
    borders = [0, *boundaries, len(graph.calls)]
    if any(begin >= end for begin, end in pairwise(borders)):
        raise PartitionError(
            "Every stage needs at least one call, so boundaries must increase strictly, from 1 to "
            f"at most {len(graph.calls) - 1}. Received: {list(boundaries)}."
        )
    spans = list(pairwise(borders))
    uses = [_stage_inputs(graph, begin, end) for begin, end in spans]
    shared = _shared(graph, spans)
    owners = {id(s.variable): s.stages[0] for s in shared}
    stages = []
    for index, (begin, end) in enumerate(spans):
        calls = graph.calls[begin:end]
        produced = {key for call in calls for key in call.outputs}
        later = set().union(*uses[index + 1 :])
        last = index == len(spans) - 1
        stages.append(
            Stage(
                graph,
                index,
                calls,
                inputs=sorted(uses[index]),
                outputs=sorted(set(graph.outputs) if last else produced & later),
                owned=[
                    v for call in calls for v in call.variables if owners.get(id(v), index) == index
                ],
            )
        )
    edges = _edges(graph, stages, [begin for begin, _ in spans])
    times = None if seconds is None else tuple(seconds)
    return Partition(graph, tuple(boundaries), tuple(stages), edges, shared, times)


def _stage_inputs(graph: Graph, begin: int, end: int) -> set[Key]:
    """A stage's inputs; the last stage, which computes the loss, consumes all model outputs."""
    calls = graph.calls[begin:end]
    used = {key for call in calls for key in call.inputs}
    if end == len(graph.calls):
        used |= set(graph.outputs)
    return used - {key for call in calls for key in call.outputs}


def _edges(graph: Graph, stages: Sequence[Stage], begins: Sequence[int]) -> tuple[Edge, ...]:
    edges = []
    ends = [*begins[1:], len(graph.calls)]
    for source in stages:
        produced = {key for call in source.calls for key in call.outputs}
        for target in stages[source.index + 1 :]:
            keys = tuple(key for key in target.inputs if key in produced)
            # A call between the two may have removed the mask.
            masked = tuple(
                key
                for key in keys
                if graph.mask_before(key, ends[source.index]) is not None
                and graph.mask_before(key, begins[target.index]) is not None
            )
            floats = tuple(key for key in keys if graph.specs[key].is_floating)
            if keys:
                edges.append(Edge(source.index, target.index, keys, masked, floats))
    return tuple(edges)


def _shared(graph: Graph, spans: Sequence[tuple[int, int]]) -> tuple[SharedVariable, ...]:
    users: dict[int, list[int]] = {}
    for index, (begin, end) in enumerate(spans):
        for variable in unique(v for call in graph.calls[begin:end] for v in call.variables):
            users.setdefault(id(variable), []).append(index)
    variables = unique(v for call in graph.calls for v in call.variables)
    return tuple(
        SharedVariable(variable, tuple(users[id(variable)]))
        for variable in variables
        if len(users[id(variable)]) > 1
    )
