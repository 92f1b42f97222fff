"""Gradients as scaled float16."""

from __future__ import annotations

import dataclasses

from tfdist._src.compression.codecs.quantizer import Quantizer
from tfdist._src.native.encoding import HALF, Encoding


@dataclasses.dataclass(frozen=True)
class FP16(Quantizer):
    """float16 with a power-of-two scale per block: `half(x / s) * s`.

    A block's largest value is scaled to between 2^14 and 2^15, so that nothing overflows and small
    gradients keep 11 bits of precision; values are summed in float32.

    16 + 32 / block bits per value; the relative error of a value is at most 2^-11, or 2^-39 of the
    largest.

    Args:
        block: the number of values that share a scale, a multiple of 8 up to 4096.
        error_feedback: whether to add what is lost to the next step's gradient.

    Source: Micikevicius et al., "Mixed precision training", 2018 (scaling against underflow).
    """

    block: int = 256
    error_feedback: bool = False

    @property
    def encoding(self) -> Encoding:
        return Encoding(HALF, block=self.block)
