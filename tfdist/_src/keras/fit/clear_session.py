"""`keras.backend.clear_session` inside the scope of a strategy.

It resets TensorFlow's default graph, to which the scope is attached: objects that a script creates
afterwards would be outside the scope.
"""

from __future__ import annotations

import functools
from typing import Any

import tensorflow as tf

from tfdist._src.internals.tensorflow import staying_in_scope
from tfdist._src.keras.patching import patch
from tfdist._src.strategy.extended import ReplicatedExtended


def install() -> None:
    """Makes a reset of the default graph preserve the scope of a tfdist strategy."""
    patch("tf.compat.v1.reset_default_graph", _inside_the_scope)


def _inside_the_scope(reset: Any) -> Any:
    @functools.wraps(reset)
    def reset_inside() -> None:
        if not isinstance(tf.distribute.get_strategy().extended, ReplicatedExtended):
            reset()
            return
        with staying_in_scope():
            reset()

    return reset_inside
