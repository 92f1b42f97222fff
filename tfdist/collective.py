"""Collectives: functions for user code, and communicators for the strategies.

```python
strategy = tfdist.MultiWorkerMirroredStrategy()
total = tfdist.collective.all_reduce(tf.constant([1.0, 2.0]))
```
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tfdist._src.comm.communicator_interface import Traffic
    from tfdist._src.comm.functions import (
        all_gather,
        all_reduce,
        all_to_all,
        barrier,
        broadcast,
        communicator,
        receive,
        reduce_scatter,
        send,
        statistics,
    )
    from tfdist._src.comm.native_communicator import NativeCommunicator

__all__ = [
    "NativeCommunicator",
    "Traffic",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "barrier",
    "broadcast",
    "communicator",
    "receive",
    "reduce_scatter",
    "send",
    "statistics",
]

_ELSEWHERE = {"NativeCommunicator": "native_communicator", "Traffic": "communicator_interface"}


def __getattr__(name: str) -> Any:
    # Loaded on first use, since the launcher must not import TensorFlow.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = _ELSEWHERE.get(name, "functions")
    return getattr(importlib.import_module(f"tfdist._src.comm.{module}"), name)


def __dir__() -> list[str]:
    return __all__
