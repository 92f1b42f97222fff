"""Traces a stage's forward and backward pass into a single graph, which can be cut into parts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf


@dataclass(frozen=True)
class Forward:
    """The result of a stage's forward pass.

    Attributes:
        outputs: tensors that have a gradient.
        others: tensors that have none.
        steps: intermediate values. The operations that lead to their gradients are the chain of
            input gradients; those that lead only to the variables' gradients can run later.
    """

    outputs: Sequence[tf.Tensor]
    others: Sequence[tf.Tensor] = ()
    steps: Sequence[tf.Tensor] = ()


@dataclass(frozen=True)
class Trace:
    """The graph of a stage's forward and backward pass, and the tensors at its boundary.

    Attributes:
        graph: the graph.
        captured: the captured outer tensors, by the names of their inner placeholders.
        inputs: the placeholders of the inputs.
        outputs: the outputs of the forward pass that have a gradient.
        others: those that have none.
        seeds: the placeholders of the outputs' gradients.
        input_gradients: for each input, its gradient or None.
        step_gradients: the gradients of the intermediate values that have one.
        variable_gradients: for each variable, a tensor, `tf.IndexedSlices` or None.
        effects: the operations of the forward pass with a side effect, in order.
    """

    graph: Any
    captured: dict[str, Any]
    inputs: list[tf.Tensor]
    outputs: list[tf.Tensor]
    others: list[tf.Tensor]
    seeds: list[tf.Tensor]
    input_gradients: list[Any]
    step_gradients: list[tf.Tensor]
    variable_gradients: list[Any]
    effects: list[tf.Operation]


def trace(
    forward: Callable[..., Forward],
    inputs: Sequence[tf.TensorSpec],
    differentiable: Sequence[bool],
    variables: Sequence[Any],
    *,
    backward: bool = True,
) -> Trace:
    """Traces a forward pass and its gradients.

    Args:
        forward: a function of one tensor for each of `inputs`.
        inputs: the specs of the inputs.
        differentiable: for each input, whether its gradient is computed.
        variables: the variables to differentiate.
        backward: False for the forward pass only.
    """
    made: dict[str, Any] = {}

    def both(*tensors: tf.Tensor) -> list[tf.Tensor]:
        watched = [t for t, wanted in zip(tensors, differentiable, strict=True) if wanted]
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            if backward:
                tape.watch([*watched, *variables])
            result = forward(*tensors)
        graph = tf.compat.v1.get_default_graph()
        made["result"] = result
        made["effects"] = [op for op in graph.get_operations() if _has_effect(op)]
        if backward:
            made["seeds"] = [tf.compat.v1.placeholder(t.dtype, t.shape) for t in result.outputs]
            steps = [t for t in result.steps if t.dtype.is_floating]
            gradients = tape.gradient(
                list(result.outputs), [*watched, *steps, *variables], made["seeds"]
            )
            made["gradients"] = (
                gradients[: len(watched)],
                gradients[len(watched) : len(watched) + len(steps)],
                gradients[len(watched) + len(steps) :],
            )
        return [tf.identity(t) for t in result.outputs]

    concrete = tf.function(both, autograph=False).get_concrete_function(*inputs)
    of_inputs, of_steps, of_variables = made.get("gradients", ([], [], []))
    gradient = iter(of_inputs)
    placeholders = concrete.inputs[: len(inputs)]
    return Trace(
        graph=concrete.graph,
        captured={
            inner.name: outer
            for inner, outer in zip(
                concrete.inputs[len(inputs) :], concrete.captured_inputs, strict=True
            )
        },
        inputs=list(placeholders),
        outputs=list(made["result"].outputs),
        others=list(made["result"].others),
        seeds=made.get("seeds", []),
        input_gradients=[
            next(gradient) if wanted and backward else None for wanted in differentiable
        ],
        step_gradients=[g for g in of_steps if g is not None],
        variable_gradients=list(of_variables),
        effects=made["effects"],
    )


_READ = ("ReadVariableOp", "ResourceGather", "VariableShape", "Placeholder")


def _has_effect(op: tf.Operation) -> bool:
    return op.op_def is not None and op.op_def.is_stateful and op.type not in _READ
