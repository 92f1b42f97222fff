"""Creates Keras variables without values, and sets and frees the values of variables."""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend.common import global_state
from tensorflow.python.ops.resource_variable_ops import (
    ResourceVariable,
    get_eager_safe_handle_data,
)

from tfdist._src.internals.keras import Trainer, Variable

_WAITING = "uninitialized_variables"


@contextlib.contextmanager
def deferred_variables() -> Iterator[list[Any]]:
    """Makes Keras create variables without values within this context.

    Later, `materialize_value` gives a value to such a variable. If a value is assigned to a
    variable within the context, for example from a file, it becomes the variable's initial value.
    Models that are loaded within the context are not compiled, because their optimizers could not
    be built for variables without values.

    Yields:
        A list to which each created variable is appended.
    """
    before = global_state.get_global_attribute(_WAITING, [])
    waiting: list[Any] = []
    global_state.set_global_attribute(_WAITING, waiting)
    try:
        with (
            _deferring_in_this_thread(),
            # Values from a file are first loaded to the CPU. They include the values for all stages
            # of a pipeline, for which this worker's device may not have enough memory.
            tf.device("CPU:0"),
            keras.StatelessScope(initialize_variables=False) as scope,
        ):
            yield waiting
        for variable in waiting:
            value = scope.get_current_value(variable)
            if value is not None:
                variable._initializer = _constant(value)
    finally:
        # Otherwise Keras would give all these variables values at the end of its next
        # `StatelessScope`.
        global_state.set_global_attribute(_WAITING, before)


_lock = threading.Lock()
_deferring: list[int] = []  # The identifier of a thread for each context that it has entered.


@contextlib.contextmanager
def _deferring_in_this_thread() -> Iterator[None]:
    """Replaces methods of Keras, but only for threads that are in this context.

    If another thread loads a model or creates a variable in the meantime, the variables get values
    as usual.
    """
    thread = threading.get_ident()
    with _lock:
        if not _deferring:
            _replace_methods()
        _deferring.append(thread)
    try:
        yield
    finally:
        with _lock:
            _deferring.remove(thread)
            if not _deferring:
                _restore_methods()


def _constant(value: Any) -> Callable[..., Any]:
    return lambda shape, dtype=None: value


def _init_later(
    init: Callable[..., None],
    self: Any,
    initializer: Any,
    shape: Any = None,
    dtype: Any = None,
    *args: Any,
    **kwargs: Any,
) -> None:
    # Keras can create a variable without a value only if the initial value is an initializer. A
    # constant is therefore converted to an initializer.
    if not callable(initializer) and not isinstance(initializer, str):
        value = keras.ops.convert_to_tensor(initializer, dtype=dtype)
        shape, dtype = value.shape, dtype or keras.backend.standardize_dtype(value.dtype)
        initializer = _constant(value)
    init(self, initializer, shape, dtype, *args, **kwargs)


def _do_not_compile(compile_from_config: Callable[..., None], self: Any, config: Any) -> None:
    pass


_REPLACEMENTS: tuple[tuple[type, str, Callable[..., None]], ...] = (
    (Trainer, "compile_from_config", _do_not_compile),
    (Variable, "__init__", _init_later),
)
# The original methods; None if the class inherits the method.
_own: dict[tuple[type, str], Any] = {}


def _replace_methods() -> None:
    for owner, name, replacement in _REPLACEMENTS:
        _own[owner, name] = vars(owner).get(name)
        setattr(owner, name, _where_deferring(getattr(owner, name), replacement))


def _restore_methods() -> None:
    for (owner, name), method in _own.items():
        if method is None:
            delattr(owner, name)
        else:
            setattr(owner, name, method)
    _own.clear()


def _where_deferring(
    method: Callable[..., None], replacement: Callable[..., None]
) -> Callable[..., None]:
    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> None:
        if threading.get_ident() in _deferring:
            replacement(method, self, *args, **kwargs)
        else:
            method(self, *args, **kwargs)

    return call


def spec_of_resource(resource: tf.Tensor) -> tf.TensorSpec | None:
    """Returns the spec of a variable's value, given the variable's resource.

    Returns None if the tensor is not the resource of a variable with a numeric or string value.
    """
    if resource.dtype != tf.resource:
        return None
    data = get_eager_safe_handle_data(resource)
    if data is None or not data.is_set or len(data.shape_and_type) != 1:
        return None
    dtype = tf.as_dtype(data.shape_and_type[0].dtype)
    if dtype in (tf.variant, tf.resource):
        return None
    return tf.TensorSpec(tf.TensorShape(data.shape_and_type[0].shape), dtype)


def stored_dtype(variable: Any) -> Any:
    """Returns the type in which a variable stores its value.

    The attribute `dtype` may be a different type, if Keras converts the value when it is read.
    """
    return variable._dtype


def has_value(variable: Any) -> bool:
    """Whether a variable has a value in this process."""
    return variable._value is not None


def draw_value(variable: Any) -> None:
    """Draws the initial value of a variable without a value, and discards it.

    If a random generator is used for several variables, its later numbers depend on the earlier
    draws. This function makes sure that they are the same as in a process where the variable has a
    value. It does nothing if the initializer has its own seed, as most of Keras's initializers do.
    """
    initializer = variable._initializer
    if variable._value is not None or not callable(initializer):
        return
    seed = getattr(initializer, "seed", None)
    maker = getattr(initializer, "__module__", None) or type(initializer).__module__
    known = maker.startswith(("keras.", "tfdist."))
    if not known or isinstance(seed, keras.random.SeedGenerator):
        initializer(tuple(variable.shape), dtype=variable.dtype)


def materialize_value(variable: Any) -> None:
    """Gives a variable its initial value, if it has no value."""
    if variable._value is None:
        variable._deferred_initialize()


def set_value_on_cpu(variable: Any, value: Any) -> None:
    """Stores a value for a variable on the CPU, regardless of the strategy in scope."""
    with tf.device("CPU:0"):
        variable._value = ResourceVariable(
            value, trainable=variable.trainable, dtype=variable.dtype
        )


def free_value(variable: Any) -> None:
    """Frees the memory of a variable's value.

    The variable keeps its shape and type, so that functions can still be traced.
    """
    variable._value = None
    variable._initializer = keras.initializers.Zeros()


def replace_value(variable: Any) -> None:
    """Replaces the `tf.Variable` of a Keras variable by a new one with the same value.

    The new `tf.Variable` is created under the strategy that is now in scope.
    """
    variable._initialize(tf.convert_to_tensor(variable._value))
