"""Resources of the graph: tokens that order collectives, and operations of atomic steps."""

from __future__ import annotations

import functools
import uuid
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist._src import native
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


def begins(*, complete: bool) -> Any:
    """A step begins.

    Args:
        complete: whether all variables that it writes will be kept.

    Returns:
        The operation, for control dependencies; None if executed eagerly.
    """
    return native.load_ops().tfdist_step_begins(order=_order(), complete=complete)


def keep(resources: Sequence[tf.Tensor]) -> list[Any]:
    """Keeps the values of variables until the step stands.

    Args:
        resources: the variables' resources. Others are left out.

    Returns:
        The operations, one for each device.
    """
    ops = native.load_ops()
    return [ops.tfdist_keep(variables=some) for some in _by_device(resources)]


def update_begins(resources: Sequence[tf.Tensor]) -> None:
    """All communication of the step has ended; what is done to these variables now waits for this.

    Args:
        resources: the variables' resources.
    """
    for some in _by_device(resources):
        native.load_ops().tfdist_update_begins(variables=some)


def prepares(resources: Sequence[tf.Tensor]) -> list[Any]:
    """This worker has written what it alone holds, so that it can redo the step.

    Args:
        resources: the resources of the variables.

    Returns:
        The operations, one for each device. Something that makes all workers wait for this one must
        be communicated behind them, before the step may stand.
    """
    return [native.load_ops().tfdist_step_prepares(variables=v) for v in _by_device(resources)]


def commits() -> Any:
    """The step stands. Returns the operation, for control dependencies."""
    return native.load_ops().tfdist_step_commits(order=_order())


def roll_back(*, redoable: bool) -> tuple[int, bool]:
    """Restores what is kept of a step that does not stand.

    Args:
        redoable: keeps what it takes out until the next step, for `redo`.

    Returns:
        The number of steps of this process that stand, and whether the one that does not has left
        no trace.
    """
    with tf.init_scope(), tf.device("CPU:0"):
        committed, whole = native.load_ops().tfdist_roll_back(redoable=redoable)
        return int(committed), bool(whole)


def redo() -> None:
    """Puts back what a redoable `roll_back` has taken out."""
    with tf.init_scope(), tf.device("CPU:0"):
        native.load_ops().tfdist_redo()


def _by_device(resources: Sequence[tf.Tensor]) -> list[list[tf.Tensor]]:
    """An operation runs on the device of its resources."""
    groups: dict[str, list[tf.Tensor]] = {}
    for resource in resources:
        groups.setdefault(resource.device, []).append(resource)
    return list(groups.values())


@functools.cache
def _order() -> tf.Tensor:
    return make(str(tf.config.list_logical_devices("CPU")[0].name), tf.float32)
