"""Private API of Keras: its global state, which each thread has for itself."""

from __future__ import annotations

import enum
from collections.abc import Callable, MutableMapping
from typing import Any

import tensorflow as tf
from keras.src.backend.common import global_state
from tensorflow.python.autograph.core import ag_ctx as autograph_context
from tensorflow.python.autograph.impl import api as autograph


class Sharing(enum.Enum):
    """How a replica's thread shares an attribute of Keras's global state with its caller.

    Keras treats a thread's state as its own: it replaces some objects, and changes others in place.
    A change in place of an object that two threads hold is seen by both, a replacement by one.
    """

    SETTING = "the caller's value; the caller gets what the replica sets"
    SCOPE = "the caller's value; what the replica enters, it also leaves"
    STACK = "a copy of the caller's list, on which the replica pushes what it enters"
    WAITING = "a list of variables without values, joined with the caller's at the end"


SHARED = {
    # keras.config, keras.utils, keras.distribution
    "distribution": Sharing.SETTING,
    "dtype_policy": Sharing.SETTING,
    "flash_attention": Sharing.SETTING,
    "interactive_logging": Sharing.SETTING,
    "nnx_enabled": Sharing.SETTING,
    "traceback_filtering": Sharing.SETTING,
    "global_random_seed": Sharing.SETTING,
    # Objects that Keras creates once.
    "global_seed_generator": Sharing.SETTING,
    "object_name_uids": Sharing.SETTING,
    "_keras_mask_dict": Sharing.SETTING,
    "saving_attr_skiplist_*": Sharing.SETTING,
    "saving_attr_skipset_*": Sharing.SETTING,
    # Contexts, which hold the value that they restore.
    "autocast_scope": Sharing.SCOPE,
    "current_call_ctx": Sharing.SCOPE,
    "custom_objects_scope_dict": Sharing.SCOPE,
    "in_tf_graph_scope": Sharing.SCOPE,
    "safe_mode_saving": Sharing.SCOPE,
    "shared_objects/id_to_config_map": Sharing.SCOPE,
    "shared_objects/id_to_obj_map": Sharing.SCOPE,
    "stateless_scope": Sharing.SCOPE,
    "symbolic_scope": Sharing.SCOPE,
    "tracking_on": Sharing.SCOPE,
    "use_legacy_config": Sharing.SCOPE,
    # Contexts that are a stack in one list.
    "name_scope_stack": Sharing.STACK,
    "remat_scope_stack": Sharing.STACK,
    "uninitialized_variables": Sharing.WAITING,
}
"""The attributes of Keras 3.8 to 3.15 under the TensorFlow backend, where `*` is any text."""


def in_callers_state(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a function to run in another thread with the calling thread's Keras state.

    The function has the state that it would have in the calling thread, such as the settings of
    `keras.config` and the generator for draws without a seed, and leaves it as it would there. So
    `SHARED` says for each attribute; others are settings.
    """
    callers = vars(global_state.GLOBAL_STATE_TRACKER)
    if not tf.executing_eagerly():
        # As TensorFlow does with a replica's function; the wrapper is not converted.
        function = autograph.tf_convert(function, autograph_context.control_status_ctx())

    def run(*args: Any, **kwargs: Any) -> Any:
        state = vars(global_state.GLOBAL_STATE_TRACKER)
        given = {name: _given(name, value) for name, value in callers.items()}
        state.update(given)
        try:
            return function(*args, **kwargs)
        finally:
            for name, value in state.items():
                _give_back(callers, name, value, given.get(name))

    unconverted: Callable[..., Any] = autograph.autograph_artifact(run)
    return unconverted


def _given(name: str, value: Any) -> Any:
    """What a replica's thread gets of its caller's value of an attribute."""
    match SHARED.get(name), value:
        case Sharing.STACK, list():
            return [*value]
        case Sharing.WAITING, list():
            # Another replica that has not returned may have given a value to some.
            return _without_values(value)
        case _:
            return value


def _give_back(callers: MutableMapping[str, Any], name: str, value: Any, given: Any) -> None:
    """Sets the caller's value of an attribute as the function would have left it there."""
    match SHARED.get(name, Sharing.SETTING):
        case Sharing.SETTING if value is not given:
            callers[name] = value
        case Sharing.WAITING:
            # Whoever defers the variables of the calling thread holds its list.
            waiting = callers.get(name)
            waiting = callers[name] = [] if waiting is None else waiting
            waiting += [v for v in value or () if all(v is not other for other in waiting)]
            waiting[:] = _without_values(waiting)
        case _:
            pass


def _without_values(variables: list[Any]) -> list[Any]:
    return [variable for variable in variables if variable._value is None]
