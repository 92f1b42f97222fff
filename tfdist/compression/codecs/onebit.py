"""1-bit SGD: gradients as one of two means."""

from __future__ import annotations

import dataclasses

from tfdist.compression.codecs.quantizer import Quantizer
from tfdist.native.encoding import TWO_MEANS, Encoding


@dataclasses.dataclass(frozen=True)
class OneBit(Quantizer):
    """Negative values become the mean of a block's negative values, the others that of the others.

    1 + 64 / block bits a value. What is lost is added to the next step's gradient, which the paper
    found to be essential.

    Args:
        block: values that share their means, a multiple of 8 up to 4096.
        error_feedback: whether what is lost is added to the next step's gradient.

    Source: Seide et al., "1-bit stochastic gradient descent and its application to data-parallel
    distributed training of speech DNNs", 2014 (there a matrix's column shares its means).
    """

    block: int = 512
    error_feedback: bool = True

    @property
    def encoding(self) -> Encoding:
        return Encoding(TWO_MEANS, block=self.block)
