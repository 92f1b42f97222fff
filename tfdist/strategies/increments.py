"""Whether what is assigned to a variable is its old value plus something.

The replicas' copies of a metric's state are summed: right for what is counted, and wrong for a
maximum, a last value or a moving average.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

_PASS_ON = {"Identity", "Cast", "Reshape", "EnsureShape", "StopGradient", "TensorScatterAdd"}
_ADD = {"AddV2", "Add", "AddN"}
_KEEP_NONE = {"Maximum", "Minimum", "Max", "Min", "Mul", "RealDiv", "DivNoNan", "Mean"}


def is_no_sum(value: Any, variable: Any) -> bool:
    """Whether a value is surely no old value of a variable plus something, nor zero.

    Args:
        value: a symbolic tensor.
        variable: a replica's, which it is assigned to.
    """
    constant = tf.get_static_value(value)
    if constant is not None:
        return bool((constant != 0).any())
    handle = value.graph.capture(variable.handle)
    return _adds(value, handle) is False


def _adds(value: Any, handle: Any) -> bool | None:
    """Whether a value is a variable's old one plus something; None where that cannot be told."""
    kind, inputs = value.op.type, list(value.op.inputs)
    if kind == "ReadVariableOp":
        return inputs[0] is handle
    if kind in _PASS_ON or kind == "Sub":
        return _adds(inputs[0], handle)
    if kind in _ADD:
        found = [_adds(i, handle) for i in inputs]
        return True if True in found else (None if None in found else False)
    if kind in ("SelectV2", "Select"):
        found = [_adds(i, handle) for i in inputs[1:]]
        return False if False in found else (None if None in found else True)
    if kind in _KEEP_NONE or kind == "Placeholder":
        return False
    return None
