"""Functions that run a stage's forward and backward pass, traced once for all microbatches."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from tfdist._src.global_view.layout import Layout
from tfdist._src.internals.keras import get_keras_mask, set_keras_mask, sublayers_of
from tfdist._src.pipeline.partition import Key, Partition, Stage, masks_of, pack
from tfdist._src.pipeline.stages.split_backward import Part, flatten, make_function, split_passes
from tfdist._src.pipeline.stages.trace import Forward, trace_for_microbatches
from tfdist._src.pipeline.stages.value_specs import ValueSpec, ValueSpecs
from tfdist._src.sharding import local_variables


class GradientSums:
    """Sums the gradients of variables over the microbatches of a step.

    Each variable with a dense gradient has an accumulator. A stage's backward pass adds a gradient
    to its accumulator as soon as the gradient has been computed. So memory never has to hold all
    gradients of a microbatch at the same time. Sparse gradients, such as the gradients of
    embeddings, are not summed but concatenated, so that they stay sparse.

    Args:
        device: the device that holds the accumulators.
    """

    def __init__(self, device: str) -> None:
        self._device = device
        self._dense: dict[int, tf.Variable] = {}
        self._active: dict[int, tf.Variable] = {}
        self._sparse: dict[int, list[tf.IndexedSlices]] = {}
        with local_variables(device):
            self._zero = tf.Variable(0.0, trainable=False, name="zero")

    @property
    def variables(self) -> list[tf.Variable]:
        """The accumulators, with values that are needed only during a step."""
        return list(self._dense.values())

    def accumulator(self, variable: Any, gradient: tf.Tensor) -> tf.Variable:
        """Returns the accumulator of a variable's dense gradient, and creates it if necessary."""
        if id(variable) not in self._dense:
            with local_variables(self._device):
                zeros = tf.zeros(variable.shape, gradient.dtype)
                self._dense[id(variable)] = tf.Variable(zeros, trainable=False, name="gradient_sum")
        return self._dense[id(variable)]

    def begin(self, variables: Iterable[Any]) -> None:
        """Begins a step: resets the accumulators, in the graph that is being traced.

        Args:
            variables: the variables with a dense gradient in this step.
        """
        self._sparse = {}
        self._active = {id(v): self._dense[id(v)] for v in variables}
        # The zero is read from a variable. If it were known during tracing, TensorFlow would turn
        # the tensors of zeros into constants, which take as much memory as the accumulators.
        zero = self._zero.read_value()
        done: list[Any] = []
        for accumulator in self._active.values():
            # Reset one accumulator after another, so that memory holds one tensor of zeros at most.
            with tf.control_dependencies(done):
                zeros = tf.fill(accumulator.shape, tf.cast(zero, accumulator.dtype))
                done = [accumulator.assign(zeros, read_value=False)]

    def add(self, variables: Sequence[Any], gradients: Sequence[Any]) -> None:
        """Adds the sparse gradients of a microbatch.

        Other gradients are ignored, since the backward pass has already added the dense gradients
        to their accumulators.

        Args:
            variables: the variables.
            gradients: for each variable, its gradient: `tf.IndexedSlices`, a tensor or None.
        """
        for variable, gradient in zip(variables, gradients, strict=True):
            if isinstance(gradient, tf.IndexedSlices):
                self._sparse.setdefault(id(variable), []).append(gradient)

    def of(self, variable: Any) -> Any:
        """Returns the summed gradient of a variable.

        The sum is a tensor, `tf.IndexedSlices`, or None if the variable has no gradient.
        """
        accumulator, slices = self._active.get(id(variable)), self._sparse.get(id(variable))
        dense = None if accumulator is None else accumulator.read_value()
        if slices is None:
            return dense
        sparse = slices[0]
        if len(slices) > 1:
            sparse = tf.IndexedSlices(
                tf.concat([s.values for s in slices], axis=0),
                tf.concat([s.indices for s in slices], axis=0),
                slices[0].dense_shape,
            )
        return sparse if dense is None else dense + tf.convert_to_tensor(sparse)


# Values that pass between stages, by key. The tensors may carry Keras masks.
Tensors = dict[Key, tf.Tensor]


@dataclass(frozen=True)
class ForwardResult:
    """The result of a microbatch's forward pass.

    Attributes:
        values: the values that later stages consume, or the model's outputs in the last stage.
        loss: the sum of the losses that the stage's layers added for the microbatch; None if they
            added no losses.
        kept: the tensors that the backward pass may need, by their names in the stage's graph.
    """

    values: Tensors
    loss: Any
    kept: dict[str, tf.Tensor]


class StageFunctions:
    """Runs the forward and backward passes of a stage that this rank holds.

    Args:
        partition: the model's partition into stages.
        index: the stage's index.
        specs: the specs of the values that pass between stages.
        differentiable: the keys of the values for which gradients are sent back; empty in
            evaluation and prediction.
        variables: the variables for which to compute gradients.
        sums: the object that sums the gradients of the variables.
        layouts_of_variables: a function that returns the layouts of variables over the workers,
            by the `id` of a variable's resource.
        training: the `training` argument of the stage's layers.
        has_loss: whether the losses that the stage's layers add are part of the model's loss. This
            is False in prediction.
        differentiable_outputs: the keys of the model's outputs for which the loss has gradients, if
            this is the last stage; None for any other stage.
        split: whether the backward pass is split, so that the gradients of the variables are
            computed by `add_gradients` and not by `backward`.
        remat: whether the backward pass runs the forward pass again, to save memory.
        jit: whether XLA compiles the passes.

    Attributes:
        stage: the stage.
        variables: the variables for which gradients are computed.
        outputs_with_gradient: the keys of the outputs for which the stage receives gradients.
        inputs_with_gradient: the keys of the inputs for which the stage sends gradients back.
        without_gradient: the keys in `inputs_with_gradient` for which the gradient is always zero,
            since no differentiable output depends on the input.
        split: whether the backward pass is split.
        written: the moving statistics that each microbatch updates from its own rows.
        dense_variables: the variables with a dense gradient.
        sparse_variables: the variables with a sparse gradient.
        done: the tensors that become available when the latest call has run; empty if the call
            added no operations.
    """

    def __init__(
        self,
        partition: Partition,
        index: int,
        specs: ValueSpecs,
        differentiable: frozenset[Key],
        variables: Sequence[Any],
        sums: GradientSums,
        layouts_of_variables: Callable[[], Mapping[int, Layout]],
        *,
        training: bool,
        has_loss: bool,
        differentiable_outputs: Sequence[Key] | None = None,
        split: bool = False,
        remat: bool = False,
        jit: bool = False,
    ) -> None:
        self.stage = partition.stages[index]
        self.variables = list(variables)
        self.done: list[tf.Tensor] = []
        self.written = _statistics(partition.stages[index]) if training else []
        self._has_loss = has_loss
        self._sums = sums
        self._training = training
        self._has_objective = False
        into = [edge for edge in partition.edges if edge.target == index]
        out = [edge for edge in partition.edges if edge.source == index]
        self._partition, self._out = partition, out
        self._masked_inputs = sorted({key for edge in into for key in edge.masked})
        sent = {key for edge in out for key in edge.keys}
        self._masked_outputs = sorted({key for edge in out for key in edge.masked})
        self.outputs_with_gradient = sorted(sent & differentiable)
        if differentiable_outputs is not None:
            sent = set(self.stage.outputs)
            self._masked_outputs = [key for key in self.stage.outputs if specs.has_mask(key)]
            self.outputs_with_gradient = sorted(differentiable_outputs)
        self._others = sorted(sent.difference(self.outputs_with_gradient))
        crossing = {key for edge in into for key in edge.keys}
        self.inputs_with_gradient = sorted(crossing & differentiable)
        inputs = [specs.of(key) for key in self.stage.inputs]
        inputs += [specs.mask_of(key) for key in self._masked_inputs]
        wanted = [key in self.inputs_with_gradient for key in self.stage.inputs]
        self._trace = trace_for_microbatches(
            self._forward,
            inputs,
            wanted + [False] * len(self._masked_inputs),
            lambda: self._result_specs(specs),
            [v.value for v in self.variables],
            layouts_of_variables,
            _statistics(self.stage) if training else [],
            backward=bool(self.variables or self.inputs_with_gradient),
        )
        self._parts = split_passes(self._trace, split=split, remat=remat)
        self.split = self._parts.weight_gradient is not None
        self.dense_variables: list[Any] = []
        accumulators: dict[str, list[tf.Variable]] = {}
        for variable, gradient in zip(self.variables, self._trace.variable_gradients, strict=False):
            if isinstance(gradient, tf.Tensor):
                accumulator = sums.accumulator(variable, gradient)
                accumulators.setdefault(gradient.name, []).append(accumulator)
                self.dense_variables.append(variable)
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
        self.without_gradient = [key for key in self.inputs_with_gradient if key not in found]
        self._sparse = [
            g if isinstance(g, tf.IndexedSlices) else None for g in self._trace.variable_gradients
        ]
        self.sparse_variables = [
            v for v, g in zip(self.variables, self._sparse, strict=False) if g is not None
        ]
        self._kept_for_variables = {t.name for t in flatten(self._sparse)}
        if self._parts.weight_gradient is not None:
            self._kept_for_variables |= {t.name for t in self._parts.weight_gradient.feeds}

    def forward(self, values: Tensors, position: Sequence[tf.Tensor]) -> ForwardResult:
        """Runs the forward pass of a microbatch.

        Args:
            values: the inputs of the stage for the microbatch, by key.
            position: the position of the microbatch in the batch, as a tensor for each spec in
                `MICROBATCH_POSITION`.
        """
        given = [values[key] for key in self.stage.inputs]
        given += [*(get_keras_mask(values[key]) for key in self._masked_inputs), *position]
        named = dict(zip((t.name for t in self._trace.inputs), given, strict=True))
        made = self._call("forward", named)
        outputs = [made[t.name] for t in self._trace.outputs]
        objective = outputs.pop() if self._has_objective else None
        others = iter([made[t.name] for t in self._trace.others])
        result = dict(zip(self.outputs_with_gradient, outputs, strict=True))
        result.update((key, next(others)) for key in self._others)
        for key in self._masked_outputs:
            set_keras_mask(result[key], next(others))
        return ForwardResult(result, objective, {**named, **made})

    def backward(
        self, kept: dict[str, tf.Tensor], gradients: Tensors, seed: tf.Tensor
    ) -> tuple[Tensors, dict[str, tf.Tensor]]:
        """Runs the backward pass of a microbatch, or only its first part if it is split.

        Args:
            kept: `ForwardResult.kept` of the microbatch.
            gradients: the gradients of `outputs_with_gradient`, by key.
            seed: the loss scale, which is the gradient with respect to the losses that the stage's
                layers add.

        Returns:
            The gradients of `inputs_with_gradient` by key, and the tensors that `add_gradients`
            needs.
        """
        self.done = []
        if self._parts.input_gradient is None:
            # The stage has no backward pass, since its outputs have no gradient. But earlier stages
            # wait for the gradients of its inputs, so the stage sends zeros.
            zeros = {
                k: tf.zeros_like(kept[self._input_names[k]]) for k in self.inputs_with_gradient
            }
            return zeros, {}
        seeds = [gradients[key] for key in self.outputs_with_gradient]
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
        for key in self.inputs_with_gradient:
            name = self._input_names[key]
            gradient = found[name]
            given[key] = (
                tf.zeros_like(kept[name])
                if gradient is None
                else tf.convert_to_tensor(_rebuilt(gradient, kept))
            )
        return given, {name: kept[name] for name in self._kept_for_variables if name in kept}

    def add_gradients(self, kept: dict[str, tf.Tensor]) -> None:
        """Adds the gradients of the variables for a microbatch to the sums.

        If the backward pass is split, this method runs its second part.

        Args:
            kept: the tensors that `backward` returned for `add_gradients`.
        """
        self.done = []
        if self.split:
            kept = {**kept, **self._call("weight_gradient", kept)}
        # The parts have already added the dense gradients to their accumulators.
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
        for key in self._masked_inputs:
            set_keras_mask(values[key], next(rest))
        made = self.stage(values, training=self._training)
        steps, self.stage.steps = self.stage.steps, []
        losses = self.stage.losses() if self._has_loss else []
        self._has_objective = bool(losses)
        outputs = [made[key] for key in self.outputs_with_gradient]
        if losses:
            outputs.append(_sum(losses))
        others = [made[key] for key in self._others]
        for edge in self._out:
            pack(self._partition, edge, made)  # This raises an error if a mask is missing.
        masks = masks_of(self._partition, self._masked_outputs, made)
        return Forward(outputs, [*others, *masks], steps)

    def _result_specs(self, specs: ValueSpecs) -> tuple[list[ValueSpec | None], list[ValueSpec]]:
        """Returns the specs of the outputs and of the other results of `_forward`."""
        outputs: list[ValueSpec | None] = [specs.of(key) for key in self.outputs_with_gradient]
        others = [specs.of(key) for key in self._others]
        others += [specs.mask_of(key) for key in self._masked_outputs]
        return outputs + ([None] if self._has_objective else []), others


def _statistics(stage: Stage) -> list[Any]:
    """Returns the moving statistics of a stage's batch normalization layers.

    Each microbatch updates them from its own rows.
    """
    layers = [one for layer in stage.layers for one in sublayers_of(layer)]
    normalizing = [one for one in layers if isinstance(one, keras.layers.BatchNormalization)]
    return [v.value for one in normalizing for v in one.non_trainable_variables]


def _sum(terms: Sequence[tf.Tensor]) -> tf.Tensor:
    return tf.add_n([tf.cast(tf.reduce_sum(t), tf.float32) for t in terms])


def _rebuilt(gradient: Any, made: Mapping[str, tf.Tensor]) -> Any:
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(
            made[gradient.values.name], made[gradient.indices.name], made[gradient.dense_shape.name]
        )
    return made[gradient.name]
