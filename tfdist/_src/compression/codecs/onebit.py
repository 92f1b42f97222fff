"""1-bit SGD: gradients as one of two means."""

from __future__ import annotations

import dataclasses

from tfdist._src.compression.codecs.quantizer import Quantizer
from tfdist._src.native.encoding import TWO_MEANS, Encoding


@dataclasses.dataclass(frozen=True)
class OneBit(Quantizer):
    """Replaces values by the mean of a block's negative or of its non-negative values.

    1 + 64 / block bits per value. What is lost is added to the next step's gradient, which the
    paper found to be essential.

    Args:
        block: the number of values that share the two means, a multiple of 8 up to 4096.
        error_feedback: whether to add what is lost to the next step's gradient.

    Source: Seide et al., "1-bit stochastic gradient descent and its application to data-parallel
    distributed training of speech DNNs", 2014 (with two means per matrix column).
    """

    block: int = 512
    error_feedback: bool = True

    @property
    def encoding(self) -> Encoding:
        return Encoding(TWO_MEANS, block=self.block)
