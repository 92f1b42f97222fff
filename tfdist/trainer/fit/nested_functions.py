"""Functions that a step calls, which `tf.function` traces for it alone.

What is traced in a step computes with its rows. TensorFlow would use such a trace again outside of
it and in other steps, and what it has traced before the step inside it.
"""

from __future__ import annotations

from typing import Any

from tfdist.strategies.step import current_step
from tfdist.trainer.patching import patch


def install() -> None:
    """Makes `tf.function` tell a tfdist step from others and from none."""
    patch("function_context.make_function_context", _with_step)


def _with_step(make_context: Any) -> Any:
    def make_context_of_step(scope_type: Any = None) -> Any:
        step, made = current_step(), make_context(scope_type)
        return made if step is None else made._replace(context=(made.context, step.key))

    return make_context_of_step
