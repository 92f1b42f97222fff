"""The values above a threshold."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from tfdist._src.compression.codecs.sparse import Sparsifier
from tfdist._src.compression.gradient import Gradient


@dataclasses.dataclass(frozen=True)
class Threshold(Sparsifier):
    """All values whose magnitude reaches a threshold, and their indices.

    64 bits each; their number varies from step to step. The other values are added to the next
    step's gradient, so that every value is sent eventually.

    Args:
        threshold: a positive magnitude. A suitable value depends on the size of the gradients.
        error_feedback: whether to add the values that are not sent to the next step's gradient.

    Source: Strom, "Scalable distributed DNN training using commodity GPU cloud computing", 2015
    (which sends the threshold instead of the value).
    """

    has_fixed_size = False

    threshold: float = 1e-3
    error_feedback: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        fits = bool(0 < np.float32(self.threshold) < np.inf)
        self._check("`threshold` must be a positive float32.", self.threshold, holds=fits)

    def density(self, step: Any) -> Any:
        return None

    def selection(self, gradients: Sequence[Gradient]) -> dict[str, Any]:
        return {"momenta": [], "threshold": self.threshold}
