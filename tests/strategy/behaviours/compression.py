"""What the behaviours of compression share."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

import tfdist
from tfdist.compression import CODECS, Policy


def codec_of(name: str) -> Any:
    """Settings for a few steps of a small model without momentum."""
    settings = {"dgc": {"momentum": 0}, "randomk": {"ratio": 0.25}}
    return CODECS[name](**settings.get(name, {}))


def strategy_of(name: str, *, within_hosts: bool = True, **settings: Any) -> Any:
    policy = Policy(codec_of(name), smallest=0, within_hosts=within_hosts, **settings)
    return tfdist.MultiWorkerMirroredStrategy(compression=policy)


def errors_of(model: keras.Model) -> list[np.ndarray]:
    optimizer = getattr(model.optimizer, "inner_optimizer", model.optimizer)
    kept = optimizer.compression_state
    return [e.numpy() for e in getattr(kept, "error", {}).values()]
