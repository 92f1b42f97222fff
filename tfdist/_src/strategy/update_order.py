"""Controls when the update of a variable starts."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

from tfdist._src.strategy.step import current_step


@contextlib.contextmanager
def updating(variable: Any, arguments: Sequence[Any]) -> Iterator[None]:
    """Makes operations that update a variable wait for the update's arguments.

    Otherwise everything that an update rule computes from its slots alone would be computed at the
    start of the step and stay in memory until the gradients are available.

    Args:
        variable: a variable of the strategy.
        arguments: the gradient and the other arguments of the update.
    """
    step = current_step()
    before = [a for a in arguments if isinstance(a, (tf.Tensor, tf.IndexedSlices))]
    if step is not None:
        before += step.before_update(variable)
    with tf.control_dependencies(before):
        yield
    if step is not None:
        step.updated(variable)
