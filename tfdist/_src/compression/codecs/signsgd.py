"""signSGD: a majority vote on signs."""

from __future__ import annotations

import dataclasses

from tfdist._src.compression.codecs.quantizer import Quantizer
from tfdist._src.native.encoding import SIGNS, Encoding


@dataclasses.dataclass(frozen=True)
class SignSGD(Quantizer):
    """The majority of the hosts' signs: 1, -1, or 0 for a tie.

    The result is not a gradient but a direction of magnitude 1, whatever the gradient's magnitude.
    Every weight therefore changes by the learning rate, as with Adam; start with one a hundred
    times smaller than for SGD. A host does not vote on a block that is all zeros.

    1 + 32 / block bits per value to the host that counts, and 2 + 32 / block back.

    Args:
        block: the number of values that share an all-zeros flag, a multiple of 8 up to 4096.

    Source: Bernstein et al., "signSGD with majority vote is communication efficient and fault
    tolerant", 2019.
    """

    block: int = 1024

    @property
    def encoding(self) -> Encoding:
        return Encoding(SIGNS, unit=True, block=self.block)
