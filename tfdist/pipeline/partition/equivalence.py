"""Which calls do the same work."""

from __future__ import annotations

import json
from collections.abc import Hashable
from typing import Any

import keras

from tfdist.pipeline.partition.graph import Call, Value


def equivalence(call: Call) -> Hashable:
    """Equal for two calls that compute the same function of their inputs and variables.

    They are of one class and have equal settings, other arguments and shapes of variables.
    """
    positions = {key: n for n, key in enumerate(call.inputs)}

    def position(argument: Any) -> Any:
        return Value(positions[argument.key]) if isinstance(argument, Value) else argument

    arguments = keras.tree.map_structure(position, (call.args, dict(call.kwargs)))
    variables = tuple((tuple(v.shape), v.dtype, v.trainable) for v in call.variables)
    return type(call.operation), _settings(call.operation), repr(arguments), variables


def _settings(operation: keras.Operation) -> Hashable:
    if isinstance(operation, keras.layers.Lambda):
        return id(operation)  # Two functions of one code may hold different values.
    try:
        return json.dumps(_without_names(operation.get_config()), sort_keys=True, default=repr)
    except Exception:  # The user's layers need not have settings that can be written down.
        return id(operation)


def _without_names(settings: Any) -> Any:
    if isinstance(settings, dict):
        return {str(k): _without_names(v) for k, v in settings.items() if k != "name"}
    if isinstance(settings, (list, tuple)):
        return [_without_names(value) for value in settings]
    return settings
