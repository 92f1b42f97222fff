"""When the update of a variable begins."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

from tfdist.strategies.step import current_step


@contextlib.contextmanager
def updating(variable: Any, arguments: Sequence[Any]) -> Iterator[None]:
    """What is added while it lasts updates a variable, and waits for what it takes.

    Otherwise all that a rule computes of its slots alone would be computed when a step begins, and
    stay in memory until the gradients come.

    Args:
        variable: of the strategy.
        arguments: the gradient, and whatever else the update takes.
    """
    step = current_step()
    before = [a for a in arguments if isinstance(a, (tf.Tensor, tf.IndexedSlices))]
    if step is not None:
        before += step.before_update(variable)
    with tf.control_dependencies(before):
        yield
    if step is not None:
        step.updated(variable)
