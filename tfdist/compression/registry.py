"""The codecs by name, and what a user may pass as `compression`."""

from __future__ import annotations

from typing import Any

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


def read(compression: Any) -> Policy | None:
    """What to compress.

    Args:
        compression: None, a name of a codec, a codec or a policy.

    Returns:
        The policy; None where nothing is to be compressed.

    Raises:
        ValueError: it is nothing of the kind.
    """
    if compression is None or isinstance(compression, Policy):
        return compression
    if isinstance(compression, Codec):
        return Policy(compression)
    if isinstance(compression, str) and compression in CODECS:
        return Policy(CODECS[compression]())
    raise ValueError(
        f"`compression` is one of {', '.join(map(repr, CODECS))}, a codec such as "
        f"tfdist.compression.Int8(), or a tfdist.compression.Policy. Received: {compression!r}."
    )
