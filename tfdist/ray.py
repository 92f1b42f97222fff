"""Training on Ray: `tfdist.ray.Trainer` for Ray Train, and a callback that reports to Ray.

This module requires the extra `tfdist[ray]`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

try:
    import ray.train  # noqa: F401
except ImportError as error:
    raise ImportError(
        "tfdist.ray needs Ray Train, which is not installed: pip install 'tfdist[ray]'"
    ) from error

from tfdist._src.ray.trainer import TfdistConfig, Trainer

if TYPE_CHECKING:
    from tfdist._src.ray.report import ReportCallback

__all__ = ["ReportCallback", "TfdistConfig", "Trainer"]


def __getattr__(name: str) -> Any:
    # `ReportCallback` imports TensorFlow. It is imported on first use, because a worker must set
    # its environment variables before it imports TensorFlow.
    if name != "ReportCallback":
        raise AttributeError(f"module 'tfdist.ray' has no attribute {name!r}")
    from tfdist._src.ray.report import ReportCallback

    return ReportCallback
