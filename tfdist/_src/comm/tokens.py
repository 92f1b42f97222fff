"""Names of collectives, tokens that order collectives, and operations that make steps atomic.

By default, a collective is named after the file and line of the user's call. If two ranks call
collectives at different lines, the names differ, and the mistake is detected even if the shapes of
the tensors are equal.
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
# This text is part of the names of files that AutoGraph generates. Only TensorFlow can map a line
# of such a file to the line that the user wrote.
_GENERATED = "__autograph_generated_file"
# Files of TensorFlow that only forward a call to the called function.
_WRAPPERS = re.compile(r"[/\\](autograph|util)[/\\]")


def of_call() -> str:
    """Returns the file and line of the innermost frame outside tfdist, TensorFlow and Keras.

    Example:
        >>> of_call()
        '<doctest of_call[0]>:1'
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and _package(frame.f_code.co_filename):
        frame = frame.f_back
    return _text(frame)


def of_tensorflow_call(*functions: str) -> str:
    """Returns the line of user code that calls one of the given TensorFlow functions.

    The function must be on the stack of this call.

    Args:
        functions: the names of the TensorFlow functions to look for.

    Returns:
        The file and line, as in `of_call`. "" if user code does not call the function itself, but
        through Keras, tfdist or another TensorFlow function. Such a call may have several causes in
        user code.
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
            # In a thread that the user has started, TensorFlow does not know the user's line.
            return f"{frame.f_code.co_name.removeprefix('tf__')}:{line}"
        file, line = original
    return f"{_name(file)}:{line}"


@functools.cache
def _name(file: str) -> str:
    """Returns a file's name without its folder.

    For a notebook cell, the number of the cell is also removed, because it may differ between
    workers.
    """
    return re.sub(r"^<ipython-input-\d+-", "<ipython-input-", os.path.basename(file))


@functools.cache
def _package(file: str) -> str:
    """Returns the package in `_PACKAGES` that contains a file; "" if none of them does."""
    return next((name for name, folder in _folders() if file.startswith(folder)), "")


@functools.cache
def _folders() -> list[tuple[str, str]]:
    specs = [(name, importlib.util.find_spec(name)) for name in _PACKAGES]
    return [(n, os.path.dirname(s.origin) + os.sep) for n, s in specs if s and s.origin]


_MARK = "_tfdist_token"
_uses = 0


def note_use() -> None:
    """Counts a use of a collective: it is run eagerly, or is added to a graph."""
    global _uses
    _uses += 1


def note_collective() -> None:
    """Counts a use of a collective, and checks that the collective is allowed here.

    Raises:
        UnsupportedError: the collective is in a function that XLA compiles as a whole.
    """
    if not tf.executing_eagerly() and is_compiled_whole():
        raise refusal_to_compile(of_call())
    note_use()


def refusal_to_compile(where: str) -> UnsupportedError:
    """Creates the error for a collective in a function that XLA compiles as a whole.

    Args:
        where: the file and line of the collective; "" if they are unknown.
    """
    return UnsupportedError(
        f"XLA cannot compile a collective{f' ({where})' if where else ''}, and a tf.function "
        "around it has jit_compile=True. Set it on the code between collectives, such as the "
        "function that computes the loss, or train with compile(jit_compile=True) and fit."
    )


def uses() -> int:
    """Returns the number of uses of collectives counted so far in this process."""
    return _uses


def apart(value: tf.Tensor) -> tf.Tensor:
    """Copies the result of a collective, so that other operations can be colocated with the copy.

    A collective runs on the device of its token, which may be a GPU. An operation that is colocated
    with the collective itself would have to run on this GPU, but some operations have no GPU
    kernel.
    """
    return tf.identity(value)


def make(device: str, dtype: tf.DType, shape: Sequence[int] = ()) -> tf.Tensor:
    """Creates the resource of a variable on a device, and fills the variable with zeros.

    Operations that take the same resource as an input run in program order, on the resource's
    device.
    """
    # A `tf.Variable` would be mirrored by a strategy in scope, so the resource is created directly.
    with tf.init_scope(), tf.device(device):
        name = f"collective_{uuid.uuid4().hex}"
        handle = tf.raw_ops.VarHandleOp(dtype=dtype, shape=shape, shared_name=name)
        assign(handle, tf.zeros(shape, dtype))
    setattr(handle, _MARK, True)
    return handle


def assign(resource: tf.Tensor, value: tf.Tensor) -> None:
    """Assigns a value to the variable of a resource; must be called eagerly."""
    tf.raw_ops.AssignVariableOp(resource=resource, value=value)


def is_token(resource: tf.Tensor) -> bool:
    """Whether a resource was created by `make`."""
    return hasattr(resource, _MARK)


def begins(*, complete: bool) -> Any:
    """Adds an operation that marks the beginning of a step that can be rolled back.

    Args:
        complete: whether `keep` is called for every variable that the step writes. If so, the whole
            step can be undone even while it updates variables.

    Returns:
        The operation, for use in control dependencies; None in eager execution.
    """
    return native.load_ops().tfdist_step_begins(order=_order(), complete=complete)


def keep(resources: Sequence[tf.Tensor]) -> list[Any]:
    """Adds operations that save the current values of variables until the step is committed.

    Args:
        resources: the resources of the variables. Resources that are not variables are ignored.

    Returns:
        The operations, one for each device that has some of the variables.
    """
    ops = native.load_ops()
    return [ops.tfdist_keep(variables=some) for some in _by_device(resources)]


def update_begins(resources: Sequence[tf.Tensor]) -> None:
    """Adds operations that mark the point at which a step begins to update variables.

    At this point, the step has finished all communication. Operations on these variables that are
    added later run after the mark.

    Args:
        resources: the resources of the variables that the step updates.
    """
    for some in _by_device(resources):
        native.load_ops().tfdist_update_begins(variables=some)


def prepares(resources: Sequence[tf.Tensor]) -> list[Any]:
    """Adds operations that wait until the step has updated this worker's worker-local state.

    Worker-local state consists of variables that differ between workers. After these updates, this
    worker can redo a step that it has rolled back but that other workers have committed.

    Args:
        resources: the resources of the worker-local variables.

    Returns:
        The operations, one for each device that has some of the variables. Between these operations
        and the commit, the program must run a collective in which all workers wait for this worker.
    """
    return [native.load_ops().tfdist_step_prepares(variables=v) for v in _by_device(resources)]


def commits() -> Any:
    """Adds an operation that commits the step.

    Returns:
        The operation, for use in control dependencies.
    """
    return native.load_ops().tfdist_step_commits(order=_order())


def roll_back(*, redoable: bool) -> tuple[int, bool]:
    """Restores the values that `keep` has saved, if the current step is not committed.

    Args:
        redoable: whether to save the step's own values until the next step, so that `redo` can
            restore them.

    Returns:
        The number of steps that this process has committed, and whether everything that the
        uncommitted step had written is undone.
    """
    with tf.init_scope(), tf.device("CPU:0"):
        committed, whole = native.load_ops().tfdist_roll_back(redoable=redoable)
        return int(committed), bool(whole)


def redo() -> None:
    """Restores the values of the step that the last `roll_back(redoable=True)` has undone."""
    with tf.init_scope(), tf.device("CPU:0"):
        native.load_ops().tfdist_redo()


def _by_device(resources: Sequence[tf.Tensor]) -> list[list[tf.Tensor]]:
    """Groups resources by device, because an operation runs on the device of its resources."""
    groups: dict[str, list[tf.Tensor]] = {}
    for resource in resources:
        groups.setdefault(resource.device, []).append(resource)
    return list(groups.values())


@functools.cache
def _order() -> tf.Tensor:
    return make(str(tf.config.list_logical_devices("CPU")[0].name), tf.float32)
