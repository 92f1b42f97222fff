"""Detects assignments that replace a variable's value instead of adding to it.

The replicas' copies of a metric's state are summed, which is correct for counts but wrong for a
maximum, a last value or a moving average.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

_PASS_ON = {"Identity", "Cast", "Reshape", "EnsureShape", "StopGradient", "TensorScatterAdd"}
_ADD = {"AddV2", "Add", "AddN"}
_KEEP_NONE = {"Maximum", "Minimum", "Max", "Min", "Mul", "RealDiv", "DivNoNan", "Mean"}


def is_replacement(value: Any, variable: Any) -> bool:
    """Whether a value is certainly neither zero nor a variable's old value plus an increment.

    Args:
        value: a symbolic tensor.
        variable: the replica's variable that it is assigned to.
    """
    constant = tf.get_static_value(value)
    if constant is not None:
        return bool((constant != 0).any())
    handle = value.graph.capture(variable.handle)
    return _is_increment(value, handle) is False


def _is_increment(value: Any, handle: Any) -> bool | None:
    """Whether a value is a variable's old value plus an increment; None if unknown."""
    kind, inputs = value.op.type, list(value.op.inputs)
    if kind == "ReadVariableOp":
        return inputs[0] is handle
    if kind in _PASS_ON or kind == "Sub":
        return _is_increment(inputs[0], handle)
    if kind in _ADD:
        found = [_is_increment(i, handle) for i in inputs]
        return True if True in found else (None if None in found else False)
    if kind in ("SelectV2", "Select"):
        found = [_is_increment(i, handle) for i in inputs[1:]]
        return False if False in found else (None if None in found else True)
    if kind in _KEEP_NONE or kind == "Placeholder":
        return False
    return None
