"""A gradient on its way to be compressed."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

import tensorflow as tf

Shape = tuple[int, ...]
# What is kept of one gradient from step to step, by its name.
Kept = Mapping[str, tf.Variable]


@dataclasses.dataclass(frozen=True)
class Gradient:
    """A gradient that is compressed.

    Attributes:
        value: float32, of the same shape on all workers.
        number: its place among those that an optimizer has, the same on all workers.
        kept: what the codec keeps of it on this worker.
    """

    value: tf.Tensor
    number: int
    kept: Kept

    @property
    def shape(self) -> Shape:
        """Its shape, which is known."""
        return tuple(self.value.shape)


def count(shape: Shape) -> int:
    """The number of values."""
    return math.prod(shape)
