"""Gradient compression: fewer bytes for what crosses from host to host."""

from __future__ import annotations

from tfdist.compression.bf16 import BF16
from tfdist.compression.codec import Codec, Quantizer
from tfdist.compression.ef_signsgd import EFSignSGD
from tfdist.compression.fp8 import FP8
from tfdist.compression.fp16 import FP16
from tfdist.compression.int8 import Int8
from tfdist.compression.natural import Natural
from tfdist.compression.onebit import OneBit
from tfdist.compression.qsgd import QSGD
from tfdist.compression.signsgd import SignSGD
from tfdist.compression.terngrad import TernGrad

CODECS: dict[str, type[Codec]] = {
    "fp16": FP16,
    "bf16": BF16,
    "fp8": FP8,
    "int8": Int8,
    "qsgd": QSGD,
    "terngrad": TernGrad,
    "natural": Natural,
    "onebit": OneBit,
    "signsgd": SignSGD,
    "ef_signsgd": EFSignSGD,
}

__all__ = ["CODECS", "Codec", "Quantizer", *sorted(c.__name__ for c in CODECS.values())]
