"""Signum: a majority vote on the signs of momenta."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import tensorflow as tf

from tfdist._src.compression.codecs.quantizer import Quantizer
from tfdist._src.compression.gradient import Gradient, Shape, count
from tfdist._src.compression.transport import Exchange
from tfdist._src.native.encoding import SIGNS, Encoding


@dataclasses.dataclass(frozen=True)
class Signum(Quantizer):
    """The majority sign of each value's momentum; the magnitude is lost.

    `u = momentum * u + (1 - momentum) * g`, and the result is `sign(sum of sign(u))`: 1, -1, or 0
    for a tie. Every weight changes by the learning rate, so start with one a hundred times smaller
    than for SGD, and use an optimizer without momentum.

    About 1 bit per value to the host that counts, and 2 back.

    Args:
        momentum: the momentum, in [0, 1).
        block: the number of values that are encoded together, a multiple of 8 up to 4096.

    Source: Bernstein et al., "signSGD with majority vote is communication efficient and fault
    tolerant", 2019.
    """

    kept_by_all = True

    momentum: float = 0.9
    block: int = 1024

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check("`momentum` must be in [0, 1).", self.momentum, holds=0 <= self.momentum < 1)

    @property
    def encoding(self) -> Encoding:
        return Encoding(SIGNS, unit=True, block=self.block)

    def kept(self, shape: Shape) -> Mapping[str, Shape]:
        return {"average": (count(shape),)}

    def sum(
        self, exchange: Exchange, gradients: Sequence[Gradient], step: tf.Tensor
    ) -> list[tf.Tensor]:
        with tf.device(exchange.encoded.device):
            averaged = [dataclasses.replace(g, value=self._average(g)) for g in gradients]
        return super().sum(exchange, averaged, step)

    def _average(self, gradient: Gradient) -> tf.Tensor:
        average = gradient.kept["average"]
        new = self.momentum * average + (1 - self.momentum) * tf.reshape(gradient.value, [-1])
        # Non-finite values show in the sum, and are not kept.
        average.assign(tf.where(tf.math.is_finite(new), new, tf.zeros_like(new)))
        return tf.reshape(new, gradient.shape)
