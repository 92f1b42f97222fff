"""Inlining: which nested models are replaced by their calls."""

from __future__ import annotations

from typing import Any

import keras

from tfdist._src.internals.keras import (
    Functional,
    get_keras_mask,
    graph_of,
    is_transparent,
    set_keras_mask,
)


def nested_graph(node: Any, around: keras.Model) -> Functional | None:
    """The graph of a nested model that can be inlined; None for any other call.

    Args:
        node: Keras's node of the call.
        around: the outermost model.
    """
    nested = node.operation
    graph = graph_of(nested)
    if graph is None or not is_transparent(nested, around) or len(node.arguments.args) != 1:
        return None
    (inputs,) = node.arguments.args
    flat = keras.tree.flatten(inputs)
    if not _fits(inputs, flat, graph) or not _passes_nothing_else(node.arguments.kwargs, flat):
        return None
    return graph


def _fits(inputs: Any, flat: list[Any], graph: Functional) -> bool:
    if len(flat) != len(graph.inputs):
        return False
    if len(flat) > 1:
        try:
            keras.tree.assert_same_structure(
                keras.tree.lists_to_tuples(inputs), keras.tree.lists_to_tuples(graph.input)
            )
        except (TypeError, ValueError):
            return False
    # A model that adds or drops an axis of its inputs is not inlined.
    return all(
        isinstance(argument, keras.KerasTensor) and len(argument.shape) == len(expected.shape)
        for argument, expected in zip(flat, graph.inputs, strict=True)
    )


def _passes_nothing_else(kwargs: dict[str, Any], flat: list[Any]) -> bool:
    for name, value in kwargs.items():
        if value is None or name == "training":
            continue
        # Keras may list the masks of the inputs among the arguments.
        masks = keras.tree.flatten(value)
        if name != "mask" or len(masks) != len(flat):
            return False
        if any(
            get_keras_mask(tensor) is not mask for tensor, mask in zip(flat, masks, strict=True)
        ):
            return False
    return True


class Convert(keras.Operation):  # type: ignore[misc]
    """Converts an input to the type that a nested model expects, and keeps its mask.

    Args:
        dtype: Keras's name of the type.
        name: the operation's name.
    """

    def __init__(self, dtype: str, name: str) -> None:
        super().__init__(name=name)
        self._to = dtype

    def call(self, value: Any) -> Any:
        """Returns the converted value."""
        mask = get_keras_mask(value)
        value = keras.ops.convert_to_tensor(value, dtype=self._to)
        if mask is not None:
            set_keras_mask(value, mask)
        return value
