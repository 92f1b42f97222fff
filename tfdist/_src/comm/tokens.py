"""Call sites, tokens that order collectives, and operations of atomic steps.

Collectives that ranks call at different lines do not match, even if their shapes agree.
"""

import functools
import importlib.util
import os
import re
import sys
import uuid
from collections.abc import Sequence
from types import FrameType
from typing import Any

import tensorflow as tf

from tfdist._src import native
from tfdist._src.internals.graphs import is_compiled_whole
from tfdist._src.internals.tensorflow import traced_stack
from tfdist.errors import UnsupportedError

_PACKAGES = ("tfdist", "tensorflow", "keras")
# Part of the name of a file that autograph has generated; only TensorFlow knows the original lines.
_GENERATED = "__autograph_generated_file"
# TensorFlow's frames between the caller and the called function.
_WRAPPERS = re.compile(r"[/\\](autograph|util)[/\\]")


def of_call() -> str:
    """The file and line of the innermost frame outside tfdist, TensorFlow and Keras.

    Example:
        >>> of_call()
        '<doctest of_call[0]>:1'
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and _package(frame.f_code.co_filename):
        frame = frame.f_back
    return _text(frame)


def of_tensorflow_call(*functions: str) -> str:
    """The line at which user code calls a TensorFlow function that leads to this call.

    Args:
        functions: the names of the TensorFlow functions.

    Returns:
        The file and line, as for `of_call`. "" if Keras, tfdist or another TensorFlow function
        calls the function, because several lines of user code may lead to such a call.
    """
    frame = sys._getframe(1).f_back
    called = None
    while frame is not None and _package(frame.f_code.co_filename) == "tensorflow":
        if not _WRAPPERS.search(frame.f_code.co_filename):
            called = frame.f_code.co_name
        frame = frame.f_back
    return _text(frame) if called in functions and _user(frame) else ""


def _user(frame: FrameType | None) -> bool:
    return frame is not None and not _package(frame.f_code.co_filename)


def _text(frame: FrameType | None) -> str:
    if frame is None:
        return ""
    file, line = frame.f_code.co_filename, frame.f_lineno
    if _GENERATED in file:
        original = next((site for site in traced_stack() if not _package(site[0])), (file, line))
        if _GENERATED in original[0]:
            # In a thread started by the user, TensorFlow does not know the original line.
            return f"{frame.f_code.co_name.removeprefix('tf__')}:{line}"
        file, line = original
    return f"{_name(file)}:{line}"


@functools.cache
def _name(file: str) -> str:
    """A file's name without the number of a notebook cell, which differs between hosts."""
    return re.sub(r"^<ipython-input-\d+-", "<ipython-input-", os.path.basename(file))


@functools.cache
def _package(file: str) -> str:
    """The element of `_PACKAGES` that a file belongs to; "" for none."""
    return next((name for name, folder in _folders() if file.startswith(folder)), "")


@functools.cache
def _folders() -> list[tuple[str, str]]:
    specs = [(name, importlib.util.find_spec(name)) for name in _PACKAGES]
    return [(n, os.path.dirname(s.origin) + os.sep) for n, s in specs if s and s.origin]


_MARK = "_tfdist_token"
_uses = 0


def note_use() -> None:
    """Records that a collective runs, or is added to a graph."""
    global _uses
    _uses += 1


def note_collective() -> None:
    """Records that a collective is about to run, or to be added to a graph.

    Raises:
        UnsupportedError: XLA would compile it.
    """
    if not tf.executing_eagerly() and is_compiled_whole():
        raise refusal_to_compile(of_call())
    note_use()


def refusal_to_compile(where: str) -> UnsupportedError:
    """The error for a collective in a function that XLA is to compile as a whole.

    Args:
        where: the collective's location, or "".
    """
    return UnsupportedError(
        f"XLA cannot compile a collective{f' ({where})' if where else ''}, and a tf.function "
        "around it has jit_compile=True. Set it on the code between collectives, such as the "
        "function that computes the loss, or train with compile(jit_compile=True) and fit."
    )


def uses() -> int:
    """The number of uses of collectives recorded so far in this process."""
    return _uses


def apart(value: tf.Tensor) -> tf.Tensor:
    """A new tensor with a collective's result, with which other operations can be colocated.

    An operation that is colocated with the collective itself must run on the device of the
    collective's token, a GPU, and would therefore need a GPU kernel.
    """
    return tf.identity(value)


def make(device: str, dtype: tf.DType, shape: Sequence[int] = ()) -> tf.Tensor:
    """Creates a resource on a device: a variable that is filled with zeros.

    Operations that hold the same resource run in order, on the resource's device.
    """
    # A bare resource, because a strategy in scope would mirror a tf.Variable.
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
    """Whether a resource was created by `make`."""
    return hasattr(resource, _MARK)


def begins(*, complete: bool) -> Any:
    """Adds an operation that begins a step.

    Args:
        complete: whether `keep` is called for all variables that the step writes.

    Returns:
        The operation, for control dependencies; None if executed eagerly.
    """
    return native.load_ops().tfdist_step_begins(order=_order(), complete=complete)


def keep(resources: Sequence[tf.Tensor]) -> list[Any]:
    """Adds operations that keep the present values of variables until the step is committed.

    Args:
        resources: the variables' resources; other resources are skipped.

    Returns:
        The operations, one for each device.
    """
    ops = native.load_ops()
    return [ops.tfdist_keep(variables=some) for some in _by_device(resources)]


def update_begins(resources: Sequence[tf.Tensor]) -> None:
    """Adds operations that mark the end of the step's communication and the start of its update.

    Later operations on these variables run after the mark.

    Args:
        resources: the variables' resources.
    """
    for some in _by_device(resources):
        native.load_ops().tfdist_update_begins(variables=some)


def prepares(resources: Sequence[tf.Tensor]) -> list[Any]:
    """Adds operations that wait until the step has written this worker's worker-local state.

    From then on, this worker can redo the step if other workers have committed it.

    Args:
        resources: the resources of the variables.

    Returns:
        The operations, one for each device. Between these operations and the commit, the program
        must run a collective in which all workers wait for this worker.
    """
    return [native.load_ops().tfdist_step_prepares(variables=v) for v in _by_device(resources)]


def commits() -> Any:
    """Adds an operation that commits the step, and returns it for control dependencies."""
    return native.load_ops().tfdist_step_commits(order=_order())


def roll_back(*, redoable: bool) -> tuple[int, bool]:
    """Restores the values that were kept for an uncommitted step.

    Args:
        redoable: whether to keep the replaced values until the next step, for `redo`.

    Returns:
        The number of steps that this process has committed, and whether all writes of the
        uncommitted step are undone.
    """
    with tf.init_scope(), tf.device("CPU:0"):
        committed, whole = native.load_ops().tfdist_roll_back(redoable=redoable)
        return int(committed), bool(whole)


def redo() -> None:
    """Restores the values that a redoable `roll_back` has replaced."""
    with tf.init_scope(), tf.device("CPU:0"):
        native.load_ops().tfdist_redo()


def _by_device(resources: Sequence[tf.Tensor]) -> list[list[tf.Tensor]]:
    """Groups resources by device: an operation runs on the device of its resources."""
    groups: dict[str, list[tf.Tensor]] = {}
    for resource in resources:
        groups.setdefault(resource.device, []).append(resource)
    return list(groups.values())


@functools.cache
def _order() -> tf.Tensor:
    return make(str(tf.config.list_logical_devices("CPU")[0].name), tf.float32)
