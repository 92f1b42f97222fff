"""Collectives: for user code the functions here, for the strategies the communicators.

```python
strategy = tfdist.MultiWorkerMirroredStrategy()
total = tfdist.collective.all_reduce(tf.constant([1.0, 2.0]))
```
"""

from __future__ import annotations

import importlib
from typing import Any

# Name -> its module; loaded at first use, since the launcher must not import TensorFlow.
_PUBLIC = {
    "NativeCommunicator": "native_communicator",
    "Traffic": "traffic",
    "all_gather": "functions",
    "all_reduce": "functions",
    "all_to_all": "functions",
    "barrier": "functions",
    "broadcast": "functions",
    "communicator": "functions",
    "receive": "functions",
    "reduce_scatter": "functions",
    "send": "functions",
    "statistics": "functions",
}

__all__ = sorted(_PUBLIC)


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'tfdist.collective' has no attribute {name!r}")
    return getattr(importlib.import_module(f"tfdist.collective.{_PUBLIC[name]}"), name)
