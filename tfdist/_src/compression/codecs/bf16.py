"""Gradients as bfloat16."""

from __future__ import annotations

import dataclasses

from tfdist._src.compression.codecs.quantizer import Quantizer
from tfdist._src.native.encoding import BFLOAT16, Encoding


@dataclasses.dataclass(frozen=True)
class BF16(Quantizer):
    """bfloat16: the range of float32, with 8 bits of precision.

    Values are summed in float32. 16 bits per value; the relative error of a value is at most 2^-8.

    Args:
        error_feedback: whether to add what is lost to the next step's gradient.

    Source: Kalamkar et al., "A study of BFLOAT16 for deep learning training", 2019.
    """

    error_feedback: bool = False

    @property
    def encoding(self) -> Encoding:
        return Encoding(BFLOAT16)
