"""Gradients as scaled float16."""

from __future__ import annotations

import dataclasses

from tfdist.compression.codecs.quantizer import Quantizer
from tfdist.native.encoding import HALF, Encoding


@dataclasses.dataclass(frozen=True)
class FP16(Quantizer):
    """float16 with a power of two for each block.

    A block's largest value becomes 2^14 to 2^15, so that nothing overflows and small gradients keep
    their 11 bits; sums are taken in float32. Formula: `half(x / s) * s`, `s` a power of two.

    16 + 32 / block bits a value; relative error of a value at most 2^-11, or 2^-39 of the largest.

    Args:
        block: values that share a scale, a multiple of 8 up to 4096.
        error_feedback: whether what is lost is added to the next step's gradient.

    Source: Micikevicius et al., "Mixed precision training", 2018 (scaling against underflow).
    """

    block: int = 256
    error_feedback: bool = False

    @property
    def encoding(self) -> Encoding:
        return Encoding(HALF, block=self.block)
