"""What all codecs have in common."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import tensorflow as tf

from tfdist.compression.gradient import Gradient, Shape
from tfdist.compression.settings import check_types
from tfdist.compression.transport import Exchange


@dataclasses.dataclass(frozen=True)
class Codec(abc.ABC):
    """A way to make the gradients smaller that cross from host to host.

    Codecs are settings: frozen, and compared by value. What one keeps from step to step is in
    variables of their own.

    Args:
        warmup_steps: the optimizer's first steps, all of them exact.

    Attributes:
        payload: how what is sent becomes a sum. `"sharded"`: each host decodes and sums a part of
            the gradients in float32 and sends the sum to all, encoded again. `"summed"`: what is
            sent is itself summed, exactly. `"gathered"`: everyone gets what everyone sends.
        on_host: whether it needs the worker's memory; else it runs where the gradients are.
        kept_by_all: whether each worker keeps something of each gradient; else only the one of a
            host that carries it.
        has_fixed_size: whether what is sent is as large as `bits_per_value` has it; else that is
            the most.
    """

    payload: ClassVar[str]
    on_host: ClassVar[bool] = True
    kept_by_all: ClassVar[bool] = False
    has_fixed_size: ClassVar[bool] = True

    warmup_steps: int = dataclasses.field(default=0, kw_only=True)

    def __post_init__(self) -> None:
        check_types(self)
        self._check("`warmup_steps` is 0 or more.", self.warmup_steps, holds=self.warmup_steps >= 0)

    @abc.abstractmethod
    def bits_per_value(self, shape: Shape) -> float:
        """What a value of a gradient of this shape takes on the wire on its way to be summed.

        A float32 takes 32.
        """

    def objection(self, optimizer: Any) -> str:
        """Why this codec does not go with a Keras optimizer; empty where it does."""
        return ""

    def compresses(self, shape: Shape) -> bool:
        """Whether a gradient of this shape becomes smaller."""
        return True

    def kept(self, shape: Shape) -> Mapping[str, Shape]:
        """The shapes of what is kept of a gradient from step to step, in float32, by name."""
        return {}

    def first(self, name: str, shape: Shape) -> tf.Tensor:
        """What is kept under a name at first, the same on all workers."""
        return tf.zeros(shape, tf.float32)

    @abc.abstractmethod
    def sum(
        self, exchange: Exchange, gradients: Sequence[Gradient], step: tf.Tensor
    ) -> list[tf.Tensor]:
        """Sums gradients over all workers.

        Args:
            exchange: the way to the other workers.
            gradients: in the order of the forward pass; what is kept of them is brought up to date.
            step: so many were compressed before, an int64 scalar, the same on all workers.

        Returns:
            The sums, bitwise equal on all workers.
        """

    def _check(self, rule: str, value: Any, *, holds: bool) -> None:
        if not holds:
            raise ValueError(f"{type(self).__name__}: {rule} Received: {value!r}.")
