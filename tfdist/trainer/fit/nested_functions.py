"""Functions called by a step, which `tf.function` must trace separately for it.

A trace made in a step uses that step's rows. TensorFlow would reuse it outside the step and in
other steps, and would reuse earlier traces inside the step.
"""

from __future__ import annotations

from typing import Any

from tfdist.strategies.step import current_step
from tfdist.trainer.patching import patch


def install() -> None:
    """Makes `tf.function` key its traces by the current tfdist step."""
    patch("function_context.make_function_context", _with_step)


def _with_step(make_context: Any) -> Any:
    def make_context_with_step(scope_type: Any = None) -> Any:
        step, made = current_step(), make_context(scope_type)
        return made if step is None else made._replace(context=(made.context, step.key))

    return make_context_with_step
