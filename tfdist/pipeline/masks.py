"""The masks of a model's outputs, found from the inputs of a whole batch.

A masked loss is divided by the number of entries that the mask leaves in the batch, so the first
microbatch needs the masks of the last. They follow from the inputs alone, by a few operations.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.errors import UnsupportedError
from tfdist.internals.keras import get_keras_mask
from tfdist.pipeline.cutting import cut
from tfdist.pipeline.partition.cut import Partition
from tfdist.pipeline.partition.graph import Key
from tfdist.pipeline.subgraph import make_function
from tfdist.pipeline.tracing import Forward, trace


def find_masks(
    partition: Partition,
) -> tuple[list[Key], Callable[[Sequence[tf.Tensor]], list[tf.Tensor]]]:
    """Which outputs of a model carry a mask, and a function from the inputs to the masks.

    Raises:
        UnsupportedError: a mask depends on the model's variables.
    """
    graph = partition.graph
    keys: list[Key] = []

    def forward(*inputs: tf.Tensor) -> Forward:
        values: dict[Key, Any] = dict(zip(graph.inputs, inputs, strict=True))
        with _Placeholders():
            for stage in partition.stages:
                values.update(stage(values, training=False))
        keys.extend(
            k for k in dict.fromkeys(graph.outputs) if get_keras_mask(values[k]) is not None
        )
        return Forward([], [get_keras_mask(values[key]) for key in keys])

    specs = [graph.specs[key].form for key in graph.inputs]
    traced = trace(forward, specs, [False] * len(specs), [], backward=False)
    if not keys:
        return [], lambda inputs: []
    part = cut(traced).forward
    names = {t.name: i for i, t in enumerate(traced.inputs)}
    for feed in part.feeds:
        if feed.name not in names:
            raise UnsupportedError(
                "A mask of a model's output must follow from the model's inputs. Received: one "
                "that depends on a variable. Mask by sample weights instead."
            )
    run = make_function(traced, part, "masks", {})

    def compute(inputs: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        *made, _ = run([inputs[names[t.name]] for t in part.feeds])
        by_name = dict(zip((t.name for t in part.fetches), made, strict=True))
        return [by_name[t.name] for t in traced.others]

    return keys, compute


class _Placeholders(keras.StatelessScope):  # type: ignore[misc]
    """Gives every variable a placeholder for its value."""

    def __init__(self) -> None:
        super().__init__(initialize_variables=False)

    def get_current_value(self, variable: Any) -> Any:
        value = super().get_current_value(variable)
        if value is None:
            value = tf.compat.v1.placeholder(variable.dtype, variable.shape)
            self.add_update((variable, value))
        return value
