"""QSGD: gradients as random multiples of their norm."""

from __future__ import annotations

import dataclasses

from tfdist._src.compression.codecs.quantizer import Quantizer
from tfdist._src.native.encoding import LEVELS, Encoding


@dataclasses.dataclass(frozen=True)
class QSGD(Quantizer):
    """Unbiased: `norm * sign(x) * k / s`, where `k` is the integer below or above `s * |x| / norm`.

    The integer above is chosen with the probability that makes the mean exact. There are
    `s = 2^(bits - 1) - 1` levels and one norm per block. bits + 32 / block bits per value; the
    squared error of a block is at most `min(n / s^2, sqrt(n) / s)` times its squared norm, where
    `n` is the number of values in a block. (The paper then applies Elias coding to the levels; here
    they have a fixed length and can be decoded in parallel.)

    Args:
        bits: the bits per value, 2, 4 or 8.
        block: the number of values that share a norm, a multiple of 8 up to 4096.
        error_feedback: whether to add what is lost to the next step's gradient.

    Source: Alistarh et al., "QSGD: Communication-efficient SGD via gradient quantization and
    encoding", 2017.
    """

    bits: int = 8
    block: int = 512
    error_feedback: bool = False

    @property
    def encoding(self) -> Encoding:
        return Encoding(LEVELS, bits=self.bits, stochastic=True, euclidean=True, block=self.block)
