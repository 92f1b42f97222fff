"""Cuts a model's calls into stages, and finds what passes between them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from itertools import pairwise

import keras

from tfdist.errors import PartitionError
from tfdist.pipeline.partition.graph import Graph, Key
from tfdist.pipeline.partition.stage import Stage, unique


@dataclasses.dataclass(frozen=True)
class Edge:
    """What one stage makes and a later one takes, which need not be the next.

    Attributes:
        source, target: the numbers of the stages.
        keys: the values, in order.
        masked: those of them that carry a mask of Keras's.
        differentiable: those of them whose gradient goes back, which are floating-point numbers.
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
        stages: their numbers, in order; the first is the owner, which answers for its
            regularizer.
    """

    variable: keras.Variable
    stages: tuple[int, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class Partition:
    """A model in stages.

    Attributes:
        graph: the model's calls.
        boundaries: the numbers of the calls with which the stages begin, but for the first.
        stages: the stages.
        edges: what passes between any two of them, sorted by source and target. An output of the
            model that is made before the last stage passes to that one.
        shared: the variables that several stages use, in the order of their owners.
        seconds: what each call takes, if the stages were chosen by that; None where they were not.
    """

    graph: Graph
    boundaries: tuple[int, ...]
    stages: tuple[Stage, ...]
    edges: tuple[Edge, ...]
    shared: tuple[SharedVariable, ...]
    seconds: tuple[float, ...] | None = None

    def where(self, key: Key) -> int | None:
        """The stage that makes a value; None for the model's inputs."""
        return self._makers.get(key)

    def model_inputs(self, stage: int) -> tuple[Key, ...]:
        """The model's inputs that a stage takes."""
        return tuple(key for key in self.stages[stage].inputs if key in self.graph.inputs)

    def model_outputs(self, stage: int) -> tuple[Key, ...]:
        """The model's outputs that a stage makes."""
        return tuple(key for key in self.stages[stage].outputs if self._is_made(key, stage))

    def _is_made(self, key: Key, stage: int) -> bool:
        return key in self.graph.outputs and self.where(key) == stage

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
        boundaries: the number of the call with which each stage but the first begins, rising.
        seconds: what each call takes, where that is known.

    Returns:
        The stages and what passes between them.

    Raises:
        PartitionError: a stage would have no calls.
    """
    borders = [0, *boundaries, len(graph.calls)]
    if any(begin >= end for begin, end in pairwise(borders)):
        raise PartitionError(
            "Every stage has at least one call, so boundaries rise, from 1 to one less than the "
            f"number of calls, {len(graph.calls)}. Received: {list(boundaries)}."
        )
    spans = list(pairwise(borders))
    uses = [_taken(graph, begin, end) for begin, end in spans]
    shared = _shared(graph, spans)
    owners = {id(s.variable): s.stages[0] for s in shared}
    stages = []
    for index, (begin, end) in enumerate(spans):
        calls = graph.calls[begin:end]
        made = {key for call in calls for key in call.outputs}
        later = set().union(*uses[index + 1 :])
        last = index == len(spans) - 1
        stages.append(
            Stage(
                graph,
                index,
                calls,
                inputs=sorted(uses[index]),
                outputs=sorted(set(graph.outputs) if last else made & later),
                owned=[
                    v for call in calls for v in call.variables if owners.get(id(v), index) == index
                ],
            )
        )
    edges = _edges(graph, stages, [begin for begin, _ in spans])
    times = None if seconds is None else tuple(seconds)
    return Partition(graph, tuple(boundaries), tuple(stages), edges, shared, times)


def _taken(graph: Graph, begin: int, end: int) -> set[Key]:
    """What a stage takes: the last one all outputs of the model, where the loss is computed."""
    calls = graph.calls[begin:end]
    used = {key for call in calls for key in call.inputs}
    if end == len(graph.calls):
        used |= set(graph.outputs)
    return used - {key for call in calls for key in call.outputs}


def _edges(graph: Graph, stages: Sequence[Stage], begins: Sequence[int]) -> tuple[Edge, ...]:
    edges = []
    ends = [*begins[1:], len(graph.calls)]
    for source in stages:
        made = {key for call in source.calls for key in call.outputs}
        for target in stages[source.index + 1 :]:
            keys = tuple(key for key in target.inputs if key in made)
            # A call between the two may have taken the mask away.
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
