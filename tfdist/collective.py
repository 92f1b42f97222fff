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
    from tfdist._src.comm.communicator_interface import NativeCommunicator, Traffic
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

_ELSEWHERE = {"NativeCommunicator", "Traffic"}


def __getattr__(name: str) -> Any:
    # The modules are imported on first use, because they import TensorFlow, and the launcher must
    # not import TensorFlow.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = "communicator_interface" if name in _ELSEWHERE else "functions"
    return getattr(importlib.import_module(f"tfdist._src.comm.{module}"), name)


def __dir__() -> list[str]:
    return __all__
