"""Functions that `tf.function` must trace separately: within a step, and where XLA compiles all.

A trace made in a step uses that step's rows. TensorFlow would reuse it outside the step and in
other steps, and would reuse earlier traces inside the step. Collectives are refused when a function
that XLA compiles is traced; TensorFlow would reuse traces made elsewhere, which have them.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdist._src.internals.graphs import is_compiled_whole
from tfdist._src.keras.patching import patch
from tfdist._src.strategy.step import current_step


def install() -> None:
    """Makes `tf.function` key its traces by the current tfdist step, and by who compiles them."""
    patch("function_context.make_function_context", _with_surroundings)


def _with_surroundings(make_context: Any) -> Any:
    def make_context_with_surroundings(scope_type: Any = None) -> Any:
        step, made = current_step(), make_context(scope_type)
        key = None if step is None else step.key
        whole = not tf.executing_eagerly() and is_compiled_whole()
        if key is None and not whole:
            return made
        return made._replace(context=(made.context, key, whole))

    return make_context_with_surroundings
