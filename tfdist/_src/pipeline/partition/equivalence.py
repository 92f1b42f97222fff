"""Identifies calls that do the same work."""

from __future__ import annotations

import json
from collections.abc import Hashable
from typing import Any

import keras

from tfdist._src.pipeline.partition.graph import Call, Value


def equivalence(call: Call) -> Hashable:
    """A key that is equal for calls that compute the same function of their inputs and variables.

    Such calls have the same class, and equal configs, other arguments and variable shapes.
    """
    positions = {key: n for n, key in enumerate(call.inputs)}

    def position(argument: Any) -> Any:
        return Value(positions[argument.key]) if isinstance(argument, Value) else argument

    arguments = keras.tree.map_structure(position, (call.args, dict(call.kwargs)))
    variables = tuple((tuple(v.shape), v.dtype, v.trainable) for v in call.variables)
    return type(call.operation), _config(call.operation), repr(arguments), variables


def _config(operation: keras.Operation) -> Hashable:
    if isinstance(operation, keras.layers.Lambda):
        return id(operation)  # Functions with the same code may close over different values.
    try:
        return json.dumps(_without_names(operation.get_config()), sort_keys=True, default=repr)
    except Exception:  # Custom layers need not have a serializable config.
        return id(operation)


def _without_names(config: Any) -> Any:
    if isinstance(config, dict):
        return {str(k): _without_names(v) for k, v in config.items() if k != "name"}
    if isinstance(config, (list, tuple)):
        return [_without_names(value) for value in config]
    return config
