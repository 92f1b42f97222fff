"""Prometheus metrics of this process: its training, waiting times and sent data.

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
    # Loaded on first use, since prometheus_client need not be installed.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from tfdist._src.monitoring.collector import Collector

    return Collector


def __dir__() -> list[str]:
    return __all__
