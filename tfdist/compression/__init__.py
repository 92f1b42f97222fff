"""Gradient compression: fewer bytes for gradients sent between hosts.

```python
strategy = tfdist.MultiWorkerMirroredStrategy(compression="int8")
```
"""

from tfdist.compression.auto import Auto
from tfdist.compression.codecs.bf16 import BF16
from tfdist.compression.codecs.codec import Codec
from tfdist.compression.codecs.dgc import DGC
from tfdist.compression.codecs.ef_signsgd import EFSignSGD
from tfdist.compression.codecs.fp8 import FP8
from tfdist.compression.codecs.fp16 import FP16
from tfdist.compression.codecs.int8 import Int8
from tfdist.compression.codecs.natural import Natural
from tfdist.compression.codecs.onebit import OneBit
from tfdist.compression.codecs.powersgd import PowerSGD
from tfdist.compression.codecs.qsgd import QSGD
from tfdist.compression.codecs.quantizer import Quantizer
from tfdist.compression.codecs.randomk import RandomK
from tfdist.compression.codecs.signsgd import SignSGD
from tfdist.compression.codecs.signum import Signum
from tfdist.compression.codecs.terngrad import TernGrad
from tfdist.compression.codecs.threshold import Threshold
from tfdist.compression.codecs.topk import TopK
from tfdist.compression.policy import Policy
from tfdist.compression.registry import CODECS, CompressionLike

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
