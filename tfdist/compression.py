"""Gradient compression, which reduces the number of bytes that hosts send to one another.

```python
strategy = tfdist.MultiWorkerMirroredStrategy(compression="int8")
```
"""

from tfdist._src.compression.auto import Auto
from tfdist._src.compression.codecs.codec import Codec
from tfdist._src.compression.codecs.powersgd import PowerSGD
from tfdist._src.compression.codecs.quantizers import (
    BF16,
    FP8,
    FP16,
    QSGD,
    EFSignSGD,
    Int8,
    Natural,
    OneBit,
    Quantizer,
    SignSGD,
    Signum,
    TernGrad,
)
from tfdist._src.compression.codecs.sparsifiers import DGC, RandomK, Threshold, TopK
from tfdist._src.compression.policy import CODECS, CompressionLike, Policy

__all__ = [
    "BF16",
    "CODECS",
    "DGC",
    "FP8",
    "FP16",
    "QSGD",
    "Auto",
    "Codec",
    "CompressionLike",
    "EFSignSGD",
    "Int8",
    "Natural",
    "OneBit",
    "Policy",
    "PowerSGD",
    "Quantizer",
    "RandomK",
    "SignSGD",
    "Signum",
    "TernGrad",
    "Threshold",
    "TopK",
]
