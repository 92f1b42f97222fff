"""A stage's forward and backward pass as functions, traced once for all microbatches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from tfdist.internals.keras import get_keras_mask, set_keras_mask
from tfdist.pipeline.partition import Key, Partition, pack
from tfdist.pipeline.stages.accumulators import GradientSums
from tfdist.pipeline.stages.heads import Head
from tfdist.pipeline.stages.split_backward import Part, cut, flatten
from tfdist.pipeline.stages.subgraph import make_function
from tfdist.pipeline.stages.trace import Forward, trace
from tfdist.pipeline.stages.value_specs import ValueSpecs

# Values between stages by key; tensors carry Keras masks.
Tensors = dict[Key, tf.Tensor]


@dataclass(frozen=True)
class Ran:
    """The result of a microbatch's forward pass.

    Attributes:
        values: the values that later stages consume.
        loss: the stage's contribution to the loss of the microbatch, or None.
        results: the other results of the stage's head.
        kept: tensors of the stage's graph, by name, for the backward pass.
    """

    values: Tensors
    loss: Any
    results: list[tf.Tensor]
    kept: dict[str, tf.Tensor]


class StageFunctions:
    """A stage that this rank holds, for training or not.

    Args:
        partition: the model's partition.
        index: the stage's index.
        specs: the specs of the values between stages.
        differentiable: the values that have a gradient; empty if nothing is trained.
        variables: the variables to differentiate.
        head: what follows the stage's calls.
        sums: the sums to which the variables' gradients are added.
        training: as for Keras layers.
        split: whether the variables' gradients are computed separately.
        remat: whether the backward pass reruns the forward pass.
        jit: whether XLA compiles the passes.

    Attributes:
        stage: the stage.
        variables: as above.
        takes_gradients: the outputs whose gradients it receives.
        gives_gradients: the inputs whose gradients it sends back.
        without_gradient: those of `gives_gradients` on which nothing differentiable depends.
        split: whether the variables' gradients are computed separately.
        written: the strategy's variables that the forward pass assigns.
        summed: the variables with a dense gradient.
        looked_up: the variables with a sparse gradient.
        done: tensors of the latest call to wait for; empty if nothing had to run.
    """

    def __init__(
        self,
        partition: Partition,
        index: int,
        specs: ValueSpecs,
        differentiable: frozenset[Key],
        variables: Sequence[Any],
        head: Head,
        sums: GradientSums,
        *,
        training: bool,
        split: bool = False,
        remat: bool = False,
        jit: bool = False,
    ) -> None:
        self.stage = partition.stages[index]
        self.variables = list(variables)
        self.done: list[tf.Tensor] = []
        self.written: list[Any] = []
        self._head = head
        self._sums = sums
        self._training = training
        self._has_objective = False
        self._reports_mean = False
        into = [edge for edge in partition.edges if edge.target == index]
        out = [edge for edge in partition.edges if edge.source == index]
        self._partition, self._out = partition, out
        self._masked = sorted({key for edge in into for key in edge.masked})
        sent = sorted({key for edge in out for key in edge.keys})
        self._gives_masks = sorted({key for edge in out for key in edge.masked})
        self.takes_gradients = [key for key in sent if key in differentiable]
        self._others = [key for key in sent if key not in differentiable]
        crossing = {key for edge in into for key in edge.keys}
        self.gives_gradients = sorted(crossing & differentiable)
        inputs = [specs.of(key).spec for key in self.stage.inputs]
        inputs += [specs.mask_of(key).spec for key in self._masked]
        wanted = [key in self.gives_gradients for key in self.stage.inputs]
        self._trace = trace(
            self._forward,
            [*inputs, *head.extra],
            wanted + [False] * (len(self._masked) + len(head.extra)),
            [v.value for v in self.variables],
            backward=bool(self.variables or self.gives_gradients),
        )
        self._parts = cut(self._trace, split=split, remat=remat)
        self.split = self._parts.weight_gradient is not None
        self.summed: list[Any] = []
        accumulators: dict[str, list[tf.Variable]] = {}
        for variable, gradient in zip(self.variables, self._trace.variable_gradients, strict=False):
            if isinstance(gradient, tf.Tensor):
                accumulator = sums.accumulator(variable, gradient)
                accumulators.setdefault(gradient.name, []).append(accumulator)
                self.summed.append(variable)
        self._run = {
            name: make_function(self._trace, part, f"stage_{index}_{name}", accumulators, jit=jit)
            for name, part in vars(self._parts).items()
            if part is not None
        }
        self._input_names = dict(
            zip(self.stage.inputs, (t.name for t in self._trace.inputs), strict=False)
        )
        pairs = zip(self.stage.inputs, self._trace.input_gradients, strict=False)
        found = {key for key, gradient in pairs if gradient is not None}
        self.without_gradient = [key for key in self.gives_gradients if key not in found]
        self._sparse = [
            g if isinstance(g, tf.IndexedSlices) else None for g in self._trace.variable_gradients
        ]
        self.looked_up = [
            v for v, g in zip(self.variables, self._sparse, strict=False) if g is not None
        ]
        self._kept_for_variables = {t.name for t in flatten(self._sparse)}
        if self._parts.weight_gradient is not None:
            self._kept_for_variables |= {t.name for t in self._parts.weight_gradient.feeds}

    def forward(self, values: Tensors, extra: Sequence[tf.Tensor]) -> Ran:
        """Runs the forward pass of a microbatch.

        Args:
            values: the stage's inputs.
            extra: the head's additional inputs.
        """
        given = [values[key] for key in self.stage.inputs]
        given += [*(get_keras_mask(values[key]) for key in self._masked), *extra]
        named = dict(zip((t.name for t in self._trace.inputs), given, strict=True))
        made = self._call("forward", named)
        outputs = [made[t.name] for t in self._trace.outputs]
        objective = outputs.pop() if self._has_objective else None
        others = iter([made[t.name] for t in self._trace.others])
        result = dict(zip(self.takes_gradients, outputs, strict=True))
        result.update((key, next(others)) for key in self._others)
        for key in self._gives_masks:
            set_keras_mask(result[key], next(others))
        loss = next(others) if self._reports_mean else objective
        return Ran(result, loss, list(others), {**named, **made})

    def backward(
        self, kept: dict[str, tf.Tensor], gradients: Tensors, seed: tf.Tensor
    ) -> tuple[Tensors, dict[str, tf.Tensor]]:
        """Runs the backward pass; only the chain of input gradients if it is split.

        Args:
            kept: the tensors kept by the forward pass.
            gradients: those of `takes_gradients`.
            seed: the gradient of the objective.

        Returns:
            The gradients of `gives_gradients`, and the tensors kept for `add_gradients`.
        """
        self.done = []
        if self._parts.input_gradient is None:
            # Its outputs have no gradient, but other stages still wait for those of its inputs.
            zeros = {k: tf.zeros_like(kept[self._input_names[k]]) for k in self.gives_gradients}
            return zeros, {}
        seeds = [gradients[key] for key in self.takes_gradients]
        if self._has_objective:
            seeds.append(tf.cast(seed, self._trace.seeds[-1].dtype))
        named = zip((t.name for t in self._trace.seeds), seeds, strict=True)
        kept = {**kept, **dict(named)}
        kept |= self._call("input_gradient", kept)
        by_name = zip(
            (t.name for t in self._trace.inputs), self._trace.input_gradients, strict=True
        )
        found = dict(by_name)
        given = {}
        for key in self.gives_gradients:
            name = self._input_names[key]
            gradient = found[name]
            given[key] = (
                tf.zeros_like(kept[name])
                if gradient is None
                else tf.convert_to_tensor(_rebuilt(gradient, kept))
            )
        return given, {name: kept[name] for name in self._kept_for_variables if name in kept}

    def add_gradients(self, kept: dict[str, tf.Tensor]) -> None:
        """Adds the variables' gradients of a microbatch to the sums.

        Args:
            kept: the tensors kept by `backward`.
        """
        self.done = []
        if self.split:
            kept = {**kept, **self._call("weight_gradient", kept)}
        # The dense ones were added as they were computed.
        sparse = [None if g is None else _rebuilt(g, kept) for g in self._sparse]
        self._sums.add(self.variables, sparse)

    def _call(self, name: str, given: Mapping[str, tf.Tensor]) -> dict[str, tf.Tensor]:
        part: Part = getattr(self._parts, name)
        *results, done = self._run[name]([given[t.name] for t in part.feeds])
        self.done = [done]
        return dict(zip((t.name for t in part.fetches), results, strict=True))

    def _forward(self, *tensors: tf.Tensor) -> Forward:
        rest = iter(tensors)
        values = {key: next(rest) for key in self.stage.inputs}
        for key in self._masked:
            set_keras_mask(values[key], next(rest))
        extra = list(rest)
        with self._head.step(extra) as step:
            made = self.stage(values, training=self._training)
            steps, self.stage.steps = self.stage.steps, []
            losses = self.stage.losses() if self._head.has_loss else []
            objective, results = self._head.finish(made, extra)
        self.written = list(step.written.values())
        self._reports_mean = objective is not None and objective.shape.rank != 0
        if self._reports_mean:
            # An unreduced loss is differentiated as its sum, but reported as its mean.
            results = [_sum([tf.reduce_mean(step.scale_by_rows(objective)), *losses]), *results]
        terms = [t for t in [objective, *losses] if t is not None]
        self._has_objective = bool(terms)
        outputs = [made[key] for key in self.takes_gradients]
        if terms:
            outputs.append(_sum(terms))
        others = [made[key] for key in self._others]
        for edge in self._out:
            pack(self._partition, edge, made)  # Raises if a mask is missing.
        masks = [get_keras_mask(made[key]) for key in self._gives_masks]
        return Forward(outputs, [*others, *masks, *results], steps)


def _sum(terms: Sequence[tf.Tensor]) -> tf.Tensor:
    return tf.add_n([tf.cast(tf.reduce_sum(t), tf.float32) for t in terms])


def _rebuilt(gradient: Any, made: Mapping[str, tf.Tensor]) -> Any:
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(
            made[gradient.values.name], made[gradient.indices.name], made[gradient.dense_shape.name]
        )
    return made[gradient.name]
