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
    from tfdist import (
        callbacks,
        collective,
        compression,
        elastic,
        errors,
        global_batch,
        monitoring,
        pipeline,
    )
    from tfdist._src.cluster.this_worker import is_chief, rank, size
    from tfdist._src.pipeline.model import PipelineModel
    from tfdist._src.pipeline.placement.strategy import HybridStrategy, PipelineStrategy
    from tfdist._src.strategy.mirrored import MirroredStrategy
    from tfdist._src.strategy.multi_worker import MultiWorkerMirroredStrategy

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
_MODULES = (
    "callbacks",
    "collective",
    "compression",
    "elastic",
    "errors",
    "global_batch",
    "monitoring",
    "pipeline",
)
# These modules need optional dependencies (extras), so they are not in `__all__`.
_ENGINES = ("ray", "spark")
_FUNCTIONS = ("is_chief", "rank", "size")
_STRATEGIES = {
    "HybridStrategy": "tfdist._src.pipeline.placement.strategy",
    "MirroredStrategy": "tfdist._src.strategy.mirrored",
    "MultiWorkerMirroredStrategy": "tfdist._src.strategy.multi_worker",
    "PipelineModel": "tfdist._src.pipeline.model",
    "PipelineStrategy": "tfdist._src.pipeline.placement.strategy",
}


def __getattr__(name: str) -> Any:
    if name in _MODULES or name in _ENGINES:
        return importlib.import_module(f"tfdist.{name}")
    if name in _FUNCTIONS:
        return getattr(importlib.import_module("tfdist._src.cluster.this_worker"), name)
    if name not in _STRATEGIES:
        raise AttributeError(f"module 'tfdist' has no attribute {name!r}")
    # `watch_for_launcher` is called before the other imports, so that the launcher learns the
    # reason if one of these imports fails.
    from tfdist._src.cluster.session.exit_reason import watch_for_launcher

    watch_for_launcher()
    from tfdist._src.keras.patching import install

    install()
    return getattr(importlib.import_module(_STRATEGIES[name]), name)


def __dir__() -> list[str]:
    return __all__
