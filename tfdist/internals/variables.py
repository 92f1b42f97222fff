"""Keras variables without values: creating them, and setting and freeing their values."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend.common import global_state
from tensorflow.python.ops.resource_variable_ops import ResourceVariable

from tfdist.internals.keras import Trainer, Variable

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
            _replaced(Trainer, "compile_from_config", lambda model, config: None),
            _replaced(Variable, "__init__", _init_later),
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
        # Otherwise the end of the next scope would materialize all of them.
        global_state.set_global_attribute(_WAITING, before)


@contextlib.contextmanager
def _replaced(owner: type, name: str, value: Any) -> Iterator[None]:
    before = vars(owner).get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if before is None:
            delattr(owner, name)
        else:
            setattr(owner, name, before)


def _constant(value: Any) -> Callable[..., Any]:
    return lambda shape, dtype=None: value


def _init_later(
    self: Any, initializer: Any, shape: Any = None, dtype: Any = None, *args: Any, **kwargs: Any
) -> None:
    # Keras defers only values from initializers, not constants.
    if not callable(initializer) and not isinstance(initializer, str):
        value = keras.ops.convert_to_tensor(initializer, dtype=dtype)
        shape, dtype = value.shape, dtype or keras.backend.standardize_dtype(value.dtype)
        initializer = _constant(value)
    super(Variable, self).__init__(initializer, shape, dtype, *args, **kwargs)


def stored_dtype(variable: Any) -> Any:
    """The type of a variable's stored value; `dtype` differs if Keras casts on reading."""
    return variable._dtype


def has_value(variable: Any) -> bool:
    """Whether a variable has a value in this process."""
    return variable._value is not None


def draw_value(variable: Any) -> None:
    """Draws and discards the initial value of a variable without a value.

    Does so only if the initializer uses a shared random generator, so that later draws from it stay
    the same. Keras's initializers use separate seeds.
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
    """Sets the value of a variable without one, on the CPU whatever strategy is in scope."""
    with tf.device("CPU:0"):
        variable._value = ResourceVariable(
            value, trainable=variable.trainable, dtype=variable.dtype
        )


def free_value(variable: Any) -> None:
    """Frees a variable's value; keeps its shape and type, for tracing."""
    variable._value = None
    variable._initializer = keras.initializers.Zeros()


def replace_value(variable: Any) -> None:
    """Replaces a variable's `tf.Variable` by a new one of the same value, in the current scope."""
    variable._initialize(tf.convert_to_tensor(variable._value))
