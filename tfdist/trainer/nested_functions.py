"""Functions that a step calls, which `tf.function` traces for it alone.

What is traced in a step computes with its rows. TensorFlow would use such a trace again outside of
it and in other steps, and what it has traced before the step inside it.
"""

from __future__ import annotations

from tfdist.internals.tensorflow import keep_traces_apart
from tfdist.strategies.step import current_step


def install() -> None:
    """Makes `tf.function` tell a tfdist step from others and from none."""
    keep_traces_apart(_key_of_step)


def _key_of_step() -> object | None:
    step = current_step()
    return None if step is None else step.key
