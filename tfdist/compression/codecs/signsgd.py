"""signSGD: the sign that most hosts vote for."""

from __future__ import annotations

import dataclasses

from tfdist.compression.codecs.quantizer import Quantizer
from tfdist.native.encoding import SIGNS, Encoding


@dataclasses.dataclass(frozen=True)
class SignSGD(Quantizer):
    """The majority of the hosts' signs: 1, -1, or 0 where they are as many.

    The result is no gradient but a direction, of magnitude 1 whatever the gradient's: the learning
    rate is then the step of every weight, as with Adam; take one a hundred times smaller than for
    SGD, to begin with. A host whose block is all zeros does not vote on it.

    1 + 32 / block bits a value to the host that counts, 2 + 32 / block back.

    Args:
        block: values that share the mark of being all zeros, a multiple of 8 up to 4096.

    Source: Bernstein et al., "signSGD with majority vote is communication efficient and fault
    tolerant", 2019.
    """

    block: int = 1024

    @property
    def encoding(self) -> Encoding:
        return Encoding(SIGNS, unit=True, block=self.block)
