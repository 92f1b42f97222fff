"""Natural compression: gradients as powers of two."""

from __future__ import annotations

import dataclasses

from tfdist._src.compression.codecs.quantizer import Quantizer
from tfdist._src.native.encoding import POWERS, Encoding


@dataclasses.dataclass(frozen=True)
class Natural(Quantizer):
    """Unbiased: `sign(x)` times the power of two below or above `|x|`.

    The power above is chosen with the probability that makes the mean exact: `|x| / 2^k - 1` for
    `2^k <= |x| < 2^(k + 1)`. The variance is at most `x^2 / 8`. 8 + 32 / block bits per value: a
    sign, and the difference of the exponent from the largest in the block. Values smaller than the
    largest by a factor of 2^126 become 0.

    Args:
        block: the number of values that share a largest exponent, a multiple of 8 up to 4096.
        error_feedback: whether to add what is lost to the next step's gradient.

    Source: Horváth et al., "Natural compression for distributed deep learning", 2019.
    """

    block: int = 256
    error_feedback: bool = False

    @property
    def encoding(self) -> Encoding:
        return Encoding(POWERS, block=self.block)
