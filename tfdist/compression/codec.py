"""What all codecs have in common."""

from __future__ import annotations

import abc
import dataclasses

from tfdist.native.encoding import Encoding


@dataclasses.dataclass(frozen=True)
class Codec(abc.ABC):
    """A way to make the gradients smaller that cross from host to host.

    Codecs are settings: frozen, and compared by value. What one remembers from step to step is in
    variables of their own.
    """

    @property
    @abc.abstractmethod
    def bits_per_value(self) -> float:
        """What a gradient's value takes on the wire on its way to be summed; float32 takes 32."""


@dataclasses.dataclass(frozen=True)
class Quantizer(Codec):
    """A codec that the core runs: fewer bits for every value, encoded while they are sent.

    The values go encoded to the host that sums their part of the gradient, which decodes them, sums
    them in float32 and sends the sum to all, encoded again: two errors, however many hosts there
    are, and the same bits everywhere.

    Attributes:
        error_feedback: whether what is lost is added to the next step's gradient.
    """

    error_feedback = False

    @property
    @abc.abstractmethod
    def encoding(self) -> Encoding:
        """How values are encoded."""

    @property
    def bits_per_value(self) -> float:
        return self.encoding.bits_per_value
