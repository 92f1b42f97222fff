"""EF-signSGD: signs times a mean magnitude, with error feedback."""

from __future__ import annotations

import dataclasses

from tfdist._src.compression.codecs.quantizer import Quantizer
from tfdist._src.native.encoding import SIGNS, Encoding


@dataclasses.dataclass(frozen=True)
class EFSignSGD(Quantizer):
    """`sign(p) * mean(|p|)` per block, where `p` is the gradient plus what was lost before.

    1 + 32 / block bits per value. Zero counts as positive.

    Args:
        block: the number of values that share a magnitude, a multiple of 8 up to 4096.
        error_feedback: whether to add what is lost to the next step's gradient.

    Source: Karimireddy et al., "Error feedback fixes SignSGD and other gradient compression
    schemes", 2019 (with one magnitude per layer).
    """

    block: int = 512
    error_feedback: bool = True

    @property
    def encoding(self) -> Encoding:
        return Encoding(SIGNS, block=self.block)
