"""tfdist: distributed training for Keras 3 on TensorFlow, with `model.fit` unchanged.

```python
import keras, tfdist

strategy = tfdist.MultiWorkerMirroredStrategy()  # reads TF_CONFIG; alone without it
with strategy.scope():
    model = keras.Sequential([keras.layers.Dense(1)])
    model.compile("adam", "mse")
model.fit(dataset, epochs=10)
```
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from tfdist._version import __version__

if TYPE_CHECKING:
    from tfdist import callbacks, collective, compression
    from tfdist.pipeline.model import PipelineModel
    from tfdist.pipeline.strategy import HybridStrategy, PipelineStrategy
    from tfdist.strategies.mirrored import MirroredStrategy
    from tfdist.strategies.multi_worker import MultiWorkerMirroredStrategy
    from tfdist.trainer import global_batch

__all__ = [
    "HybridStrategy",
    "MirroredStrategy",
    "MultiWorkerMirroredStrategy",
    "PipelineModel",
    "PipelineStrategy",
    "__version__",
    "callbacks",
    "collective",
    "compression",
    "global_batch",
]

_PACKAGES = ("callbacks", "collective", "compression")
_STRATEGIES = {
    "HybridStrategy": "tfdist.pipeline.strategy",
    "MirroredStrategy": "tfdist.strategies.mirrored",
    "MultiWorkerMirroredStrategy": "tfdist.strategies.multi_worker",
    "PipelineModel": "tfdist.pipeline.model",
    "PipelineStrategy": "tfdist.pipeline.strategy",
}


def __getattr__(name: str) -> Any:
    # TensorFlow takes seconds to import, so it waits until something needs it.
    if name in _PACKAGES:
        return importlib.import_module(f"tfdist.{name}")
    if name == "global_batch":
        return importlib.import_module("tfdist.trainer.global_batch")
    if name not in _STRATEGIES:
        raise AttributeError(f"module 'tfdist' has no attribute {name!r}")
    from tfdist.trainer.hooks import install

    install()
    return getattr(importlib.import_module(_STRATEGIES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_STRATEGIES, *_PACKAGES, "global_batch"])
