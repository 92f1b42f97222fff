"""TernGrad: gradients as -1, 0 and 1 times a scale."""

from __future__ import annotations

import dataclasses

from tfdist._src.compression.codecs.quantizer import Quantizer
from tfdist._src.native.encoding import LEVELS, Encoding


@dataclasses.dataclass(frozen=True)
class TernGrad(Quantizer):
    """Unbiased except for clipping: `m * sign(x) * b`, where `b` is 1 with probability `|x| / m`.

    `m` is the largest magnitude of a block, after values are clipped to `clip` standard deviations.
    2 + 32 / block bits per value.

    Args:
        clip: the clipping bound in standard deviations, computed about zero; 0 for no clipping.
        block: the number of values that share a scale, a multiple of 8 up to 4096.
        error_feedback: whether to add what is lost to the next step's gradient.

    Source: Wen et al., "TernGrad: Ternary gradients to reduce communication in distributed deep
    learning", 2017 (with one scale per layer).
    """

    clip: float = 2.5
    block: int = 512
    error_feedback: bool = False

    @property
    def encoding(self) -> Encoding:
        return Encoding(LEVELS, bits=2, stochastic=True, clip=self.clip, block=self.block)
