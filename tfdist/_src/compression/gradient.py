"""A gradient to be compressed."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

import tensorflow as tf

Shape = tuple[int, ...]
# The codec state of one gradient, by name.
Kept = Mapping[str, tf.Variable]


@dataclasses.dataclass(frozen=True)
class Gradient:
    """A gradient to be compressed.

    Attributes:
        value: a float32 tensor, of the same shape on all workers.
        number: its index among the optimizer's gradients, the same on all workers.
        kept: its codec state on this worker.
    """

    value: tf.Tensor
    number: int
    kept: Kept

    @property
    def shape(self) -> Shape:
        """Its static shape."""
        return tuple(self.value.shape)


def count(shape: Shape) -> int:
    """The number of values."""
    return math.prod(shape)
