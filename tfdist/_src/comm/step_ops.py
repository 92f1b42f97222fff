"""Operations by which a step counts or leaves no trace (csrc/tf/undo_log.h)."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist._src import native
from tfdist._src.comm import tokens


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
    return tokens.make(str(tf.config.list_logical_devices("CPU")[0].name), tf.float32)
