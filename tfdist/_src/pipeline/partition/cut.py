"""Cuts a model's calls into stages, and determines the values that pass between the stages."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, TypeAlias

import keras
import tensorflow as tf

from tfdist._src.internals.keras import get_keras_mask, own_losses, set_keras_mask
from tfdist._src.pipeline.partition.graph import Call, Graph, Key, copy
from tfdist._src.pipeline.partition.profiler import bytes_of, count
from tfdist.errors import PartitionError

AfterCall: TypeAlias = Callable[[Call, dict[Key, Any]], dict[Key, Any]]


class Stage:
    """A stage: consecutive calls of a model that run together.

    Args:
        graph: the model's graph.
        index: the stage's index, from 0.
        calls: the stage's calls.
        inputs: the keys of the values that the stage consumes, in ascending order. These values
            are inputs of the model and outputs of earlier stages.
        outputs: the keys of the values that the stage returns. The last stage returns all outputs
            of the model, including outputs that earlier stages computed. Any other stage returns
            the values that later stages consume.
        owned: the variables to which this stage applies their regularizers. If several stages use
            a variable, only one of them owns it, so that its regularization loss counts once.

    Attributes:
        index: the stage's index.
        calls: the stage's calls.
        inputs: the keys of the values that the stage consumes.
        outputs: the keys of the values that the stage returns.
        layers: the layers that the stage calls, without duplicates, in order of their first calls.
        steps: the values that the calls computed when the stage last ran. `StageFunctions`
            reads this list while it traces the stage, and then clears the list.
    """

    def __init__(
        self,
        graph: Graph,
        index: int,
        calls: Sequence[Call],
        inputs: Sequence[Key],
        outputs: Sequence[Key],
        owned: Sequence[keras.Variable],
    ) -> None:
        self.index = index
        self.calls = tuple(calls)
        self.inputs = tuple(inputs)
        self.outputs = tuple(outputs)
        layers = {id(call.layer): call.layer for call in calls if call.layer is not None}
        self.layers: tuple[keras.layers.Layer, ...] = tuple(layers.values())
        self.steps: list[Any] = []
        self._owned = {id(v) for v in owned}
        self._body = _Body(self._run, self.layers, f"stage_{index}", graph.model.dtype_policy)

    def __repr__(self) -> str:
        return f"<Stage {self.index}: {self.calls[0].name} to {self.calls[-1].name}>"

    @property
    def variables(self) -> list[keras.Variable]:
        """The weights and states (such as seeds) that the stage uses, without duplicates."""
        return unique(v for call in self.calls for v in call.variables)

    @property
    def trainable_variables(self) -> list[keras.Variable]:
        """The trainable variables, according to the current `trainable` flags of the layers."""
        layers = unique(v for layer in self.layers for v in layer.trainable_variables)
        read = (v for call in self.calls for v in call.reads if v.trainable)
        return unique((*layers, *read))

    def __call__(
        self,
        values: Mapping[Key, Any],
        training: bool | None = None,
        after: AfterCall | None = None,
    ) -> dict[Key, Any]:
        """Runs the stage, in eager mode or while a function is traced.

        Args:
            values: tensors by key, for at least the keys in the stage's `inputs`. As in a Keras
                model, a tensor may carry a mask. The tensors and their masks are not modified.
            training: the `training` argument of the model's call.
            after: a function that receives each call and the call's outputs after the call has
                run. The stage then uses the outputs that this function returns.

        Returns:
            The tensors of the stage's `outputs` by key, with their masks.
        """
        # Inputs with a mask are copied, since attention layers remove the masks of their inputs.
        inputs = {
            key: values[key] if get_keras_mask(values[key]) is None else copy(values[key])
            for key in self.inputs
        }
        outputs: dict[Key, Any] = self._body(inputs, training=training, after=after)
        return outputs

    def losses(self) -> list[Any]:
        """Returns the losses that the stage's layers added in the latest call of the stage.

        These are the losses from `add_loss` and from activity regularizers, and the losses from the
        regularizers of the variables that the stage owns. The loss passed to `compile` is not
        included. Together, the stages return each entry of the model's `losses` exactly once.
        """
        regularized = [
            v for v in self.trainable_variables if v.regularizer and id(v) in self._owned
        ]
        return own_losses(self.layers) + [v.regularizer(v) for v in regularized]

    def _run(
        self, values: dict[Key, Any], training: bool | None, after: AfterCall | None
    ) -> dict[Key, Any]:
        values = dict(values)
        for call in self.calls:
            outputs = call(values, training)
            values.update(outputs if after is None else after(call, outputs))
        self.steps = [value for key, value in values.items() if key not in self.inputs]
        return {key: values[key] for key in self.outputs}


class _Body(keras.layers.Layer):  # type: ignore[misc]
    """Runs the calls of a stage as the call of one Keras layer.

    So Keras does the same as for a call of a model: it sets the call context and the
    mixed-precision dtypes, and it first clears the losses of the layers in `tracked`.
    """

    def __init__(
        self,
        run: Callable[[dict[Key, Any], bool | None, AfterCall | None], dict[Key, Any]],
        layers: Sequence[keras.layers.Layer],
        name: str,
        dtype: Any,
    ) -> None:
        # Inputs are not cast, since the original model does not cast values between its calls.
        super().__init__(name=name, dtype=dtype, autocast=False)
        self.supports_masking = True
        self.run = run
        self.tracked = list(layers)
        self.built = True

    def call(
        self, values: dict[Key, Any], training: bool | None = None, after: AfterCall | None = None
    ) -> dict[Key, Any]:
        """Runs the calls."""
        return self.run(values, training, after)

    def compute_mask(self, inputs: Any, previous_mask: Any) -> None:
        """Returns None, since the stage's own calls already set the masks of the outputs."""


def unique(variables: Any) -> list[Any]:
    """Removes duplicate variables, and keeps the order of the others."""
    return list({id(v): v for v in variables}.values())


@dataclasses.dataclass(frozen=True)
class Edge:
    """The values that one stage produces and a later stage consumes.

    The two stages need not be adjacent.

    Attributes:
        source: the index of the stage that produces the values.
        target: the index of the stage that consumes the values.
        keys: the keys of the values, in ascending order.
        masked: the keys of the values that carry a Keras mask.
        differentiable: the keys of the floating-point values. Only these can have gradients.
    """

    source: int
    target: int
    keys: tuple[Key, ...]
    masked: tuple[Key, ...]
    differentiable: tuple[Key, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class SharedVariable:
    """A variable that several stages use.

    Examples are tied embeddings, and a layer that is called in several stages.

    Attributes:
        variable: the variable.
        stages: the indices of the stages that use the variable, in ascending order. The first
            stage is the owner, which applies the variable's regularizer.
    """

    variable: keras.Variable
    stages: tuple[int, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class Partition:
    """A model divided into stages.

    Attributes:
        graph: the model's calls.
        boundaries: the index of the first call of each stage except the first stage.
        stages: the stages.
        edges: the values that pass between each pair of stages, sorted by source and then by
            target. The last stage also receives the outputs of the model that earlier stages
            produce.
        shared: the variables that several stages use, in the order in which the model's calls
            first use them.
        seconds: for each call, the measured or estimated time by which the stages were chosen;
            None if the stages were cut at given calls.
    """

    graph: Graph
    boundaries: tuple[int, ...]
    stages: tuple[Stage, ...]
    edges: tuple[Edge, ...]
    shared: tuple[SharedVariable, ...]
    seconds: tuple[float, ...] | None = None

    def where(self, key: Key) -> int | None:
        """Returns the index of the stage that produces a value, or None for a model input."""
        return self._makers.get(key)

    def model_inputs(self, stage: int) -> tuple[Key, ...]:
        """Returns the keys of the model's inputs that a stage consumes."""
        return tuple(key for key in self.stages[stage].inputs if key in self.graph.inputs)

    @functools.cached_property
    def _makers(self) -> dict[Key, int]:
        return {
            key: stage.index
            for stage in self.stages
            for call in stage.calls
            for key in call.outputs
        }


def cut_model(
    graph: Graph, boundaries: Sequence[int], seconds: Sequence[float] | None = None
) -> Partition:
    """Cuts a model into stages before given calls.

    Args:
        graph: the model.
        boundaries: the index of the first call of each stage except the first stage, in ascending
            order.
        seconds: the time of each call, to be stored in the partition; None if the times are not
            known.

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
    """Returns the keys of the values that a stage consumes.

    The last stage consumes all outputs of the model, since it computes the loss.
    """
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
            # A value may have a mask when `source` ends, but not when `target` begins: a call
            # between the two stages may remove the mask.
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


def pack(partition: Partition, edge: Edge, values: Mapping[Key, Any]) -> list[tf.Tensor]:
    """Returns the list of tensors that the source stage of an edge sends.

    Args:
        partition: the stages.
        edge: an edge of `partition`.
        values: tensors by key, for at least the keys of the edge.

    Returns:
        The values in the order of `edge.keys`, then the masks in the order of `edge.masked`.

    Raises:
        PartitionError: a value in `edge.masked` has no mask.
    """
    return [values[key] for key in edge.keys] + masks_of(partition, edge.masked, values)


def masks_of(
    partition: Partition, keys: Sequence[Key], values: Mapping[Key, Any]
) -> list[tf.Tensor]:
    """Returns the Keras masks of some values, in the order of `keys`.

    Args:
        partition: the stages.
        keys: the keys of values that must have a mask, according to the model's graph.
        values: tensors by key, for at least these keys.

    Raises:
        PartitionError: one of these values has no mask.
    """
    masks = [get_keras_mask(values[key]) for key in keys]
    for key, mask in zip(keys, masks, strict=True):
        if mask is None:
            maker = next(c for c in partition.graph.calls if key in c.outputs)
            raise PartitionError(
                "A layer that sets masks must do so in training, evaluation and prediction. "
                f"Received: no mask from '{maker.name}'. Set it in every call, or cut the model "
                "elsewhere."
            )
    return masks


def unpack(edge: Edge, tensors: Sequence[tf.Tensor]) -> dict[Key, tf.Tensor]:
    """Unpacks the tensors that an edge's target stage received.

    Args:
        edge: the edge.
        tensors: the tensors in the order in which `pack` returns them.

    Returns:
        The values by key, each with its mask, if any.
    """
    # The values are copied, since the same tensor may be passed to several stages of this process
    # with different masks.
    values = {key: tf.identity(t) for key, t in zip(edge.keys, tensors, strict=False)}
    for key, mask in zip(edge.masked, tensors[len(edge.keys) :], strict=True):
        set_keras_mask(values[key], mask)
    return values


def specs(partition: Partition, edge: Edge, rows: int | None = None) -> list[tf.TensorSpec]:
    """Returns the specs of the tensors that `pack` returns for an edge.

    Args:
        partition: the stages.
        edge: an edge of `partition`.
        rows: the number of rows in a microbatch; None if the specs must leave it open.
    """
    graph = partition.graph
    begin = (0, *partition.boundaries)[edge.target]
    masks = [graph.mask_before(key, begin) for key in edge.masked]
    known = [graph.specs[key] for key in edge.keys]
    known += [mask for mask in masks if mask is not None]
    return [tf.TensorSpec(spec.with_rows(rows).shape, spec.dtype) for spec in known]


_TITLES = ("stage", "calls", "share of cost", "parameters", "sends to later stages")


def summary(
    partition: Partition, seconds: Sequence[float] | None = None, rows: int = 1
) -> list[str]:
    """Formats a table of the stages.

    Args:
        partition: the stages.
        seconds: the time of each call. If None, the table does not show the stages' costs.
        rows: the number of rows in a microbatch, from which the size of the sent values is
            computed.

    Returns:
        The lines of the table: a header, then one line for each stage. The line shows the stage's
        first and last call, its share of the total time, its number of parameters, and how many
        megabytes the stage sends to later stages for each microbatch.
    """
    table = [_TITLES]
    for stage in partition.stages:
        table.append(
            (
                str(stage.index),
                _calls(stage),
                _share(partition, stage, seconds),
                f"{_parameters(stage):,}",
                f"{_sent(partition, stage, rows) / 1e6:.3f} MB",
            )
        )
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in table
    ]


def _calls(stage: Stage) -> str:
    first, last = stage.calls[0].name, stage.calls[-1].name
    return first if len(stage.calls) == 1 else f"{first} ... {last}"


def _share(partition: Partition, stage: Stage, seconds: Sequence[float] | None) -> str:
    if seconds is None or not sum(seconds):
        return "-"
    begin = (0, *partition.boundaries)[stage.index]
    return f"{sum(seconds[begin : begin + len(stage.calls)]) / sum(seconds):.1%}"


def _parameters(stage: Stage) -> int:
    weights = (w for layer in stage.layers for w in layer.weights)
    return count(unique((*weights, *(v for call in stage.calls for v in call.reads))))


def _sent(partition: Partition, stage: Stage, rows: int) -> int:
    graph = partition.graph
    keys = [key for edge in partition.edges if edge.source == stage.index for key in edge.keys]
    return sum(bytes_of(graph.specs[key], rows) for key in keys)
