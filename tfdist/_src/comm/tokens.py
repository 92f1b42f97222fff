"""Resources that collectives hold so that TensorFlow runs them in the program's order."""

from __future__ import annotations

import uuid
from collections.abc import Sequence

import tensorflow as tf

from tfdist._src.comm import call_site
from tfdist._src.internals.graphs import is_compiled_whole
from tfdist.errors import UnsupportedError

_MARK = "_tfdist_token"
_uses = 0


def note_use() -> None:
    """Records that a collective is run, or added to a graph."""
    global _uses
    _uses += 1


def note_collective() -> None:
    """Records the same of a collective that is about to be run or added.

    Raises:
        UnsupportedError: XLA would compile it.
    """
    if not tf.executing_eagerly() and is_compiled_whole():
        raise refusal_to_compile(call_site.of_call())
    note_use()


def refusal_to_compile(where: str) -> UnsupportedError:
    """The error of a collective in a function that XLA is to compile as a whole.

    Args:
        where: where the collective is, or "".
    """
    return UnsupportedError(
        f"XLA cannot compile a collective{f' ({where})' if where else ''}, and a tf.function "
        "around it has jit_compile=True. Set it on what lies between collectives, such as the "
        "function that computes the loss, or train by compile(jit_compile=True) and fit."
    )


def uses() -> int:
    """The number of uses recorded so far."""
    return _uses


def apart(value: tf.Tensor) -> tf.Tensor:
    """A collective's result on a GPU, for operations to be colocated with.

    One that is colocated with the collective itself shares the device of its token, and so would
    need a kernel for GPUs.
    """
    return tf.identity(value)


def make(device: str, dtype: tf.DType, shape: Sequence[int] = ()) -> tf.Tensor:
    """Creates a resource on a device, a variable of zeros.

    Operations that hold the same resource run in order, on its device.
    """
    # A bare resource, since a strategy in scope would mirror a tf.Variable.
    with tf.init_scope(), tf.device(device):
        name = f"collective_{uuid.uuid4().hex}"
        handle = tf.raw_ops.VarHandleOp(dtype=dtype, shape=shape, shared_name=name)
        assign(handle, tf.zeros(shape, dtype))
    setattr(handle, _MARK, True)
    return handle


def assign(resource: tf.Tensor, value: tf.Tensor) -> None:
    """Sets the value of a resource; called eagerly."""
    tf.raw_ops.AssignVariableOp(resource=resource, value=value)


def is_token(resource: tf.Tensor) -> bool:
    """Whether a resource has been created by `make`."""
    return hasattr(resource, _MARK)
