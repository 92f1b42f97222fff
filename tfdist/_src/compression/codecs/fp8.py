"""Gradients as scaled 8-bit floating-point numbers."""

from __future__ import annotations

import dataclasses

from tfdist._src.compression.codecs.quantizer import Quantizer
from tfdist._src.native.encoding import FLOAT8, Encoding


@dataclasses.dataclass(frozen=True)
class FP8(Quantizer):
    """8 bits, 4 of exponent and 3 of mantissa ("e4m3"), with a scale per block.

    A block's largest magnitude `m` becomes 448, the format's maximum:
    `e4m3(x * 448 / m) * m / 448`.

    8 + 32 / block bits per value; the relative error of a value is at most 2^-4, or 2^-18 of the
    largest.

    Args:
        block: the number of values that share a scale, a multiple of 8 up to 4096.
        error_feedback: whether to add what is lost to the next step's gradient.

    Source: Micikevicius et al., "FP8 formats for deep learning", 2022.
    """

    block: int = 256
    error_feedback: bool = False

    @property
    def encoding(self) -> Encoding:
        return Encoding(FLOAT8, block=self.block)
