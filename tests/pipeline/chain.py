"""Runs the stages of a partition one after another, as processes would, and their gradients."""

from __future__ import annotations

import dataclasses
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist._src.pipeline.partition import Partition, pack, specs, unpack


@dataclasses.dataclass(frozen=True)
class Result:
    """What a pass through a model gives.

    Attributes:
        outputs: of the model, flat.
        loss: the sum of the model's losses.
        gradients: for each trainable variable of the model; None where it has none.
        state: all the model's variables after the pass.
    """

    outputs: list[Any]
    loss: float
    gradients: list[Any]
    state: list[np.ndarray]


def run_model(model: keras.Model, inputs: Any, training: bool) -> Result:
    """A pass through the whole model, after which its state is as it was."""
    before = [v.numpy() for v in model.variables]
    with tf.GradientTape() as tape:
        outputs = keras.tree.flatten(model(inputs, training=training))
        losses = _total(model.losses)
        objective = _objective(outputs) + losses
    gradients = tape.gradient(objective, [v.value for v in model.trainable_variables])
    return Result(outputs, float(losses), [_dense(g) for g in gradients], _reset(model, before))


def run_stages(
    partition: Partition, inputs: Any, training: bool, forget_masks: bool = False
) -> Result:
    """A pass through the stages, after which the model's state is as it was.

    Args:
        partition: the stages.
        inputs: the batch.
        training: as of the model's call.
        forget_masks: leaves out the masks between the stages.
    """
    model = partition.graph.model
    before = [v.numpy() for v in model.variables]
    batch = partition.graph.unpack_inputs(inputs)
    rows = next(iter(batch.values())).shape[0]
    received = [{} for _ in partition.stages]
    passes, loss = [], 0.0
    for stage in partition.stages:
        values = received[stage.index]
        given = {key: batch[key] for key in partition.model_inputs(stage.index)}
        with tf.GradientTape() as tape:
            tape.watch([v for v in values.values() if v.dtype.is_floating])
            made = stage({**given, **values}, training=training)
            added = _total(stage.losses())
            last = stage is partition.stages[-1]
            if last:
                outputs = keras.tree.flatten(partition.graph.pack_outputs(made))
                added_objective = _objective(outputs) + added
            else:
                added_objective = added
        loss += float(added)
        passes.append((stage, tape, values, {} if last else made, added_objective))
        for edge in partition.edges:
            if edge.source == stage.index:
                sent = _across(partition, edge, made, rows, forget_masks)
                received[edge.target].update(sent)
    gradients = _backward(model, passes)
    return Result(outputs, loss, gradients, _reset(model, before))


def _across(partition, edge, made, rows, forget_masks):
    """What arrives in another process: plain numbers."""
    tensors = [tf.constant(tensor.numpy()) for tensor in pack(partition, edge, made)]
    for spec, tensor in zip(specs(partition, edge, rows), tensors, strict=True):
        assert spec.is_compatible_with(tensor), (spec, tensor)
    if forget_masks:
        # Older versions of Keras also pass masks as arguments.
        tensors = [tf.ones_like(t) if t.dtype == tf.bool else t for t in tensors]
    return unpack(edge, tensors)


def _backward(model, passes):
    sums = {id(v): None for v in model.trainable_variables}
    backwards = {}
    for stage, tape, values, made, objective in reversed(passes):
        variables = stage.trainable_variables
        floats = {key: value for key, value in values.items() if value.dtype.is_floating}
        arrived = {key: backwards[key] for key in made if backwards.get(key) is not None}
        gradients = tape.gradient(
            [objective, *(made[key] for key in arrived)],
            [*floats.values(), *(v.value for v in variables)],
            output_gradients=[tf.ones_like(objective), *arrived.values()],
        )
        for key, gradient in zip(floats, gradients, strict=False):
            backwards[key] = _sum(backwards.get(key), gradient)
        for variable, gradient in zip(variables, gradients[len(floats) :], strict=True):
            sums[id(variable)] = _sum(sums[id(variable)], _dense(gradient))
    return [sums[id(v)] for v in model.trainable_variables]


def _objective(outputs):
    """Some number that depends on all outputs, each entry in another way."""
    total = tf.zeros([])
    for output in outputs:
        weights = np.random.default_rng(1).normal(size=output.shape)
        total += tf.reduce_sum(tf.cast(output, tf.float32) * tf.constant(weights, tf.float32))
    return total


def _total(losses):
    return tf.add_n([tf.zeros([]), *(tf.reduce_sum(tf.cast(x, tf.float32)) for x in losses)])


def _reset(model, before):
    after = [v.numpy() for v in model.variables]
    for variable, value in zip(model.variables, before, strict=True):
        variable.assign(value)
    return after


def _dense(gradient):
    return None if gradient is None else tf.convert_to_tensor(gradient)


def _sum(one, other):
    if one is None or other is None:
        return other if one is None else one
    return one + other
