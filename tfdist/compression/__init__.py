"""Gradient compression: fewer bytes for what crosses from host to host.

```python
strategy = tfdist.MultiWorkerMirroredStrategy(compression="int8")
```
"""

from __future__ import annotations

from tfdist.compression.auto import Auto
from tfdist.compression.codec import Codec
from tfdist.compression.policy import Policy
from tfdist.compression.quantizer import Quantizer
from tfdist.compression.registry import CODECS

globals().update({codec.__name__: codec for codec in CODECS.values()})

__all__ = ["CODECS", "Auto", "Codec", "Policy", "Quantizer"]
__all__ += sorted(codec.__name__ for codec in CODECS.values())
