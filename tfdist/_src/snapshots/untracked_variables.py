"""Variables of a model that Keras does not list among its variables.

Such are the states of a stateful recurrent layer, and `tf.Variable`s that a model or a layer has as
attributes and changes in a step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import keras
import tensorflow as tf

from tfdist._src.internals.keras import sublayers_of
from tfdist._src.keras.optimizers.of_model import optimizers_of


def untracked_variables(model: keras.Model) -> list[Any]:
    """Those that are attributes of the model or its layers, alone or in lists and dicts.

    Args:
        model: compiled and built.

    Returns:
        Each once, in an order that depends on the program alone.
    """
    known = {id(variable) for variable in model.variables}
    known |= {id(v) for metric in model.metrics for v in metric.variables}
    known |= {id(v) for optimizer in optimizers_of(model).values() for v in optimizer.variables}
    found = []
    for layer in sublayers_of(model):
        for name, value in sorted(vars(layer).items()):
            if name.startswith("_"):  # Of Keras, or of tfdist.
                continue
            for variable in _variables_in([value]):
                if id(variable) not in known and _is_numeric(variable):
                    known.add(id(variable))
                    found.append(variable)
    return found


def _variables_in(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, (keras.Variable, tf.Variable)):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _variables_in(value)
        elif isinstance(value, dict):
            yield from _variables_in(value.values())


def _is_numeric(variable: Any) -> bool:
    kind = tf.as_dtype(variable.dtype)
    return bool(kind.is_floating or kind.is_integer or kind.is_bool or kind.is_complex)
