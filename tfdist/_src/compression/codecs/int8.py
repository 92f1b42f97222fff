"""Gradients as 8-bit integers."""

from __future__ import annotations

import dataclasses

from tfdist._src.compression.codecs.quantizer import Quantizer
from tfdist._src.native.encoding import LEVELS, Encoding


@dataclasses.dataclass(frozen=True)
class Int8(Quantizer):
    """8-bit integers with a scale per block: `round(x * 127 / m) * m / 127`.

    `m` is the block's largest magnitude. 8 + 32 / block bits per value; the error of a value is at
    most `m / 254`, or with stochastic rounding at most `m / 127` and zero on average.

    Args:
        stochastic: whether to round up or down at random, without bias, instead of to the nearest
            integer.
        block: the number of values that share a scale, a multiple of 8 up to 4096.
        error_feedback: whether to add what is lost to the next step's gradient.

    Source: Dettmers, "8-bit approximations for parallelism in deep learning", 2016 (with blocks
    and stochastic rounding as in Alistarh et al., "QSGD", 2017).
    """

    stochastic: bool = False
    block: int = 256
    error_feedback: bool = False

    @property
    def encoding(self) -> Encoding:
        return Encoding(LEVELS, bits=8, stochastic=self.stochastic, block=self.block)
