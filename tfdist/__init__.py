"""tfdist: distributed training for Keras 3 on TensorFlow, with `model.fit` unchanged.

```python
import keras, tfdist

strategy = tfdist.MultiWorkerMirroredStrategy()  # reads TF_CONFIG; without it, one process
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
    from tfdist import callbacks, collective, compression, elastic, errors, monitoring, pipeline
    from tfdist.cluster.this_worker import is_chief, rank, size
    from tfdist.pipeline.model import PipelineModel
    from tfdist.pipeline.placement.strategy import HybridStrategy, PipelineStrategy
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
    "elastic",
    "errors",
    "global_batch",
    "is_chief",
    "monitoring",
    "pipeline",
    "rank",
    "size",
]

# TensorFlow takes seconds to import, so the modules that need it are imported on first use.
_MODULES = {
    "callbacks": "tfdist.callbacks",
    "collective": "tfdist.collective",
    "compression": "tfdist.compression",
    "elastic": "tfdist.elastic",
    "errors": "tfdist.errors",
    "global_batch": "tfdist.trainer.global_batch",
    "monitoring": "tfdist.monitoring",
    "pipeline": "tfdist.pipeline",
}
# These need extras, so they are not in `__all__`.
_ENGINES = {"ray": "tfdist.ray", "spark": "tfdist.spark"}
_FUNCTIONS = ("is_chief", "rank", "size")
_STRATEGIES = {
    "HybridStrategy": "tfdist.pipeline.placement.strategy",
    "MirroredStrategy": "tfdist.strategies.mirrored",
    "MultiWorkerMirroredStrategy": "tfdist.strategies.multi_worker",
    "PipelineModel": "tfdist.pipeline.model",
    "PipelineStrategy": "tfdist.pipeline.placement.strategy",
}


def __getattr__(name: str) -> Any:
    if module := _MODULES.get(name) or _ENGINES.get(name):
        return importlib.import_module(module)
    if name in _FUNCTIONS:
        return getattr(importlib.import_module("tfdist.cluster.this_worker"), name)
    if name not in _STRATEGIES:
        raise AttributeError(f"module 'tfdist' has no attribute {name!r}")
    # First, so that the launcher learns why importing the rest fails.
    from tfdist.cluster.session.exit_reason import watch_for_launcher

    watch_for_launcher()
    from tfdist.trainer.install import install

    install()
    return getattr(importlib.import_module(_STRATEGIES[name]), name)


def __dir__() -> list[str]:
    return __all__
