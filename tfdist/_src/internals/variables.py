"""Keras variables without values: creating them, and setting and freeing their values."""

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
    """Creates variables without values, to be materialized later by `materialize_value`.

    Yields the growing list of these variables. Values assigned to them inside the scope, as from a
    file, become their initial values. Loaded models are not compiled, since their optimizers cannot
    be built without values.
    """
    before = global_state.get_global_attribute(_WAITING, [])
    waiting: list[Any] = []
    global_state.set_global_attribute(_WAITING, waiting)
    try:
        with (
            _deferring_in_this_thread(),
            # Otherwise a file's values for all stages would fill this stage's device.
            tf.device("CPU:0"),
            keras.StatelessScope(initialize_variables=False) as scope,
        ):
            yield waiting
        for variable in waiting:
            value = scope.get_current_value(variable)
            if value is not None:
                variable._initializer = _constant(value)
    finally:
        # Otherwise the end of Keras's next `StatelessScope` would materialize all these variables.
        global_state.set_global_attribute(_WAITING, before)


_lock = threading.Lock()
_deferring: list[int] = []  # The threads that defer variables, once for each nested context.


@contextlib.contextmanager
def _deferring_in_this_thread() -> Iterator[None]:
    """Replaces methods of Keras's classes, only for the threads that defer variables.

    Other threads may load models and create variables in the meantime, with values as usual.
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
    # Keras defers only values from initializers, not constants.
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
_own: dict[tuple[type, str], Any] = {}  # The replaced methods; None for an inherited one.


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
    """The spec of a variable's value, by its resource; None for resources of other kinds."""
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
    """The type of a variable's stored value; `dtype` differs if Keras casts on reading."""
    return variable._dtype


def has_value(variable: Any) -> bool:
    """Whether a variable has a value in this process."""
    return variable._value is not None


def draw_value(variable: Any) -> None:
    """Draws and discards the initial value of a variable without a value.

    Does so only if the initializer may use a shared random generator, so that later draws from that
    generator stay the same. Keras's initializers use separate seeds, unless they have a
    `SeedGenerator`.
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
    """Materializes a variable: assigns its initial value if it has none."""
    if variable._value is None:
        variable._deferred_initialize()


def set_value_on_cpu(variable: Any, value: Any) -> None:
    """Gives a variable a value on the CPU, regardless of the strategy in scope."""
    with tf.device("CPU:0"):
        variable._value = ResourceVariable(
            value, trainable=variable.trainable, dtype=variable.dtype
        )


def free_value(variable: Any) -> None:
    """Frees a variable's value; keeps its shape and type, for tracing."""
    variable._value = None
    variable._initializer = keras.initializers.Zeros()


def replace_value(variable: Any) -> None:
    """Replaces a variable's `tf.Variable` with an equal new one, in the current scope."""
    variable._initialize(tf.convert_to_tensor(variable._value))
