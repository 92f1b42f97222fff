"""Gradient compression: fewer bytes for gradients sent between hosts.

```python
strategy = tfdist.MultiWorkerMirroredStrategy(compression="int8")
```
"""

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
from tfdist._src.compression.codecs.quantizer import Quantizer
from tfdist._src.compression.codecs.randomk import RandomK
from tfdist._src.compression.codecs.signsgd import SignSGD
from tfdist._src.compression.codecs.signum import Signum
from tfdist._src.compression.codecs.terngrad import TernGrad
from tfdist._src.compression.codecs.threshold import Threshold
from tfdist._src.compression.codecs.topk import TopK
from tfdist._src.compression.policy import Policy
from tfdist._src.compression.registry import CODECS, CompressionLike

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
