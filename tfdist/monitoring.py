"""Prometheus metrics of this process: its training steps, its waiting times and the bytes it sends.

```python
prometheus_client.REGISTRY.register(tfdist.monitoring.Collector())
```
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tfdist._src.monitoring.collector import Collector

__all__ = ["Collector"]


def __getattr__(name: str) -> Any:
    # The module is imported on first use, because prometheus_client is an optional dependency.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from tfdist._src.monitoring.collector import Collector

    return Collector


def __dir__() -> list[str]:
    return __all__
