"""The codecs by name, and the values of the argument `compression`."""

from __future__ import annotations

from typing import TypeAlias

from tfdist._src.compression.auto import Auto
from tfdist._src.compression.codecs.bf16 import BF16
from tfdist._src.compression.codecs.codec import Codec
from tfdist._src.compression.codecs.dgc import DGC
from tfdist._src.compression.codecs.ef_signsgd import EFSignSGD
from tfdist._src.compression.codecs.fp8 import FP8
from tfdist._src.compression.codecs.fp16 import FP16
from tfdist._src.compression.codecs.int8 import Int8
from tfdist._src.compression.codecs.natural import Natural
from tfdist._src.compression.codecs.onebit import OneBit
from tfdist._src.compression.codecs.powersgd import PowerSGD
from tfdist._src.compression.codecs.qsgd import QSGD
from tfdist._src.compression.codecs.randomk import RandomK
from tfdist._src.compression.codecs.signsgd import SignSGD
from tfdist._src.compression.codecs.signum import Signum
from tfdist._src.compression.codecs.terngrad import TernGrad
from tfdist._src.compression.codecs.threshold import Threshold
from tfdist._src.compression.codecs.topk import TopK
from tfdist._src.compression.policy import Policy

CompressionLike: TypeAlias = str | Codec | Auto | Policy | None
"""The type of `compression`: a name, a codec, a choice by measurement, or a policy."""

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
    "signum": Signum,
    "topk": TopK,
    "randomk": RandomK,
    "threshold": Threshold,
    "dgc": DGC,
    "powersgd": PowerSGD,
}


def name_of(codec: Codec | None) -> str:
    """A codec's name; `"none"` for None, and the class name of an unregistered codec."""
    if codec is None:
        return "none"
    names = (name for name, kind in CODECS.items() if type(codec) is kind)
    return next(names, type(codec).__name__)


def read(compression: CompressionLike) -> Policy | None:
    """Converts the argument `compression` to a policy.

    Args:
        compression: None, the name of a codec, `"auto"`, a codec, `Auto` or a policy.

    Returns:
        The policy; None for no compression.

    Raises:
        ValueError: the argument is none of these.
    """
    if compression is None or isinstance(compression, Policy):
        return compression
    if isinstance(compression, (Codec, Auto)):
        return Policy(compression)
    if isinstance(compression, str) and compression == "auto":
        return Policy(Auto())
    if isinstance(compression, str) and compression in CODECS:
        return Policy(CODECS[compression]())
    raise ValueError(
        f"`compression` must be one of {', '.join(map(repr, (*CODECS, 'auto')))}, a codec such as "
        f"tfdist.compression.Int8(), or a tfdist.compression.Policy. Received: {compression!r}."
    )
