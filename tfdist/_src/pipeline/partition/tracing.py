"""Effects of a call that its arguments do not show: masks, and variables of other layers.

A call that may have such effects is traced once, symbolically, without touching any variable.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import keras

from tfdist._src.internals.keras import (
    compute_output_spec,
    set_keras_mask,
    sublayers_of,
    unchanged_state,
)
from tfdist._src.pipeline.partition.graph import Call, Key, Spec, mask_of

_ROWS = 2


def needs_trace(operation: keras.Operation) -> bool:
    """Whether a call may create a mask, or use a variable that it does not own.

    Keras layers do neither, except those that compute a mask from values and those that run a
    user's function.
    """
    if not isinstance(operation, keras.layers.Layer):
        return not _is_from_keras(operation)
    makers = (keras.layers.Embedding, keras.layers.Masking, keras.layers.Lambda)
    return any(isinstance(s, makers) or not _is_from_keras(s) for s in sublayers_of(operation))


def trace(
    call: Call, specs: Mapping[Key, Spec], masks: Mapping[Key, Spec | None]
) -> tuple[dict[Key, Spec | None], list[keras.Variable]]:
    """Traces a call.

    Args:
        call: the call.
        specs: the specs of its inputs, among others.
        masks: the Keras masks on its inputs.

    Returns:
        The Keras masks on the inputs and outputs after the call, and each variable that it reads,
        once, including those of its layer.
    """
    found: dict[Key, Spec | None] = {}
    reads = _Reads()

    def run(values: dict[Key, Any], masks: dict[Key, Any]) -> list[Any]:
        for key, mask in masks.items():
            set_keras_mask(values[key], mask)
        with reads:
            values = {**values, **call(values, None)}
        for key in (*call.inputs, *call.outputs):
            mask = mask_of(values[key])
            found[key] = None if mask is None else Spec((None, *mask.shape[1:]), mask.dtype)
        return []

    inputs = {key: _symbol(specs[key]) for key in call.inputs}
    masked = {key: _symbol(mask) for key in call.inputs if (mask := masks.get(key)) is not None}
    with unchanged_state():
        compute_output_spec(run, inputs, masked)
    return found, list(reads.variables.values())


class _Reads(keras.StatelessScope):  # type: ignore[misc]
    """Records the variables that are read inside it, including those without a value."""

    def __init__(self) -> None:
        super().__init__()
        self.variables: dict[int, keras.Variable] = {}

    def get_current_value(self, variable: keras.Variable) -> Any:
        self.variables[id(variable)] = variable
        return super().get_current_value(variable)


def _symbol(spec: Spec) -> keras.KerasTensor:
    # Some layers need the number of rows, such as TimeDistributed before Keras 3.9.
    return keras.KerasTensor(spec.with_rows(_ROWS).shape, dtype=spec.dtype)


def _is_from_keras(operation: keras.Operation) -> bool:
    return type(operation).__module__.split(".")[0] == "keras"
