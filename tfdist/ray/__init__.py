"""Training on Ray: `tfdist.ray.Trainer`, a trainer of Ray Train, and what reports to Ray.

Needs the extra `tfdist[ray]`.
"""

from __future__ import annotations

try:
    import ray.train  # noqa: F401
except ImportError as error:
    raise ImportError(
        "tfdist.ray needs Ray Train, which is not installed: pip install 'tfdist[ray]'"
    ) from error

from tfdist.ray.backend import TfdistConfig
from tfdist.ray.report import ReportCallback
from tfdist.ray.trainer import Trainer

__all__ = ["ReportCallback", "TfdistConfig", "Trainer"]
