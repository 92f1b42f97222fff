"""Resources that collectives hold so that TensorFlow runs them in the program's order."""

from __future__ import annotations

import uuid

import tensorflow as tf

_uses = 0


def note_use() -> None:
    """Notes that a collective is run, or made in a graph."""
    global _uses
    _uses += 1


def uses() -> int:
    """How many have been noted so far."""
    return _uses


def make(device: str, dtype: tf.DType) -> tf.Tensor:
    """A new resource on a device, a variable of zero.

    Operations that hold the same one run in order, and stay on its device.
    """
    # A bare resource, since a tf.Variable would be mirrored by a strategy in scope.
    with tf.init_scope(), tf.device(device):
        name = f"collective_{uuid.uuid4().hex}"
        handle = tf.raw_ops.VarHandleOp(dtype=dtype, shape=[], shared_name=name)
        tf.raw_ops.AssignVariableOp(resource=handle, value=tf.zeros([], dtype))
    return handle
