"""The codecs by name, and what a user may pass as `compression`."""

from __future__ import annotations

from typing import Any

from tfdist.compression.auto import Auto
from tfdist.compression.bf16 import BF16
from tfdist.compression.codec import Codec
from tfdist.compression.dgc import DGC
from tfdist.compression.ef_signsgd import EFSignSGD
from tfdist.compression.fp8 import FP8
from tfdist.compression.fp16 import FP16
from tfdist.compression.int8 import Int8
from tfdist.compression.natural import Natural
from tfdist.compression.onebit import OneBit
from tfdist.compression.policy import Policy
from tfdist.compression.powersgd import PowerSGD
from tfdist.compression.qsgd import QSGD
from tfdist.compression.randomk import RandomK
from tfdist.compression.signsgd import SignSGD
from tfdist.compression.signum import Signum
from tfdist.compression.terngrad import TernGrad
from tfdist.compression.threshold import Threshold
from tfdist.compression.topk import TopK

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
    """A codec's name; `"none"` for None, and its type's for one that is not in the registry."""
    if codec is None:
        return "none"
    names = (name for name, kind in CODECS.items() if type(codec) is kind)
    return next(names, type(codec).__name__)


def read(compression: Any) -> Policy | None:
    """What to compress.

    Args:
        compression: None, a name of a codec, `"auto"`, a codec, `Auto` or a policy.

    Returns:
        The policy; None where nothing is to be compressed.

    Raises:
        ValueError: it is nothing of the kind.
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
        f"`compression` is one of {', '.join(map(repr, (*CODECS, 'auto')))}, a codec such as "
        f"tfdist.compression.Int8(), or a tfdist.compression.Policy. Received: {compression!r}."
    )
