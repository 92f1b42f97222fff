"""The largest values."""

from __future__ import annotations

import dataclasses
from typing import Any

from tfdist._src.compression.codecs.sparse import Sparsifier


@dataclasses.dataclass(frozen=True)
class TopK(Sparsifier):
    """The values of largest magnitude of each gradient, and their indices.

    Exactly `ratio * n` of `n` values, at least one, 64 bits each. The other values are added to the
    next step's gradient, without which training does not converge.

    Args:
        ratio: the fraction of the values that is sent, in (0, 1].
        error_feedback: whether to add the values that are not sent to the next step's gradient.

    Source: Aji and Heafield, "Sparse communication for distributed gradient descent", 2017;
    Stich et al., "Sparsified SGD with memory", 2018.
    """

    ratio: float = 0.01
    error_feedback: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check("`ratio` must be in (0, 1].", self.ratio, holds=0 < self.ratio <= 1)

    def density(self, step: Any) -> Any:
        return float(self.ratio)
