"""Deep gradient compression: the largest accumulated values, with momentum."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfdist._src.compression.codecs.sparse import Sparsifier
from tfdist._src.compression.gradient import Gradient, Shape, count

_RAMP = 4  # stages, each sending a quarter of the previous one


@dataclasses.dataclass(frozen=True)
class DGC(Sparsifier):
    """The largest values of each host's accumulated momentum, and their indices.

    `u = momentum * u + g; v = v + u`; the largest values of `v` are sent, 64 bits each, and `u` and
    `v` are zeroed there (momentum correction and factor masking). Since the codec applies momentum,
    use `keras.optimizers.SGD` without it; exact gradients, including those of warm-up steps, then
    have no momentum.

    Args:
        ratio: the fraction of the values that is sent after the ramp, in (0, 1].
        momentum: the momentum, in [0, 1).
        clip_norm: clips the norm of each gradient to `clip_norm / sqrt(hosts)` before it is
            accumulated; None for no clipping.
        ramp_steps: the number of steps after the warm-up over which the fraction decreases: 1/4,
            1/16, 1/64, 1/256.

    Source: Lin et al., "Deep gradient compression: reducing the communication bandwidth for
    distributed training", 2018.
    """

    ratio: float = 0.001
    momentum: float = 0.9
    clip_norm: float | None = None
    ramp_steps: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check("`ratio` must be in (0, 1].", self.ratio, holds=0 < self.ratio <= 1)
        self._check("`momentum` must be in [0, 1).", self.momentum, holds=0 <= self.momentum < 1)
        positive = self.clip_norm is None or self.clip_norm > 0
        self._check("`clip_norm` must be positive or None.", self.clip_norm, holds=positive)
        self._check("`ramp_steps` must be >= 0.", self.ramp_steps, holds=self.ramp_steps >= 0)

    def objection(self, optimizer: Any) -> str:
        has_momentum = getattr(optimizer, "momentum", 0) or hasattr(optimizer, "beta_1")
        if not self.momentum or not has_momentum:
            return ""
        return (
            "DGC applies momentum itself, so the optimizer must not. Received: "
            f"{type(optimizer).__name__}. Train with keras.optimizers.SGD without momentum, or use "
            "tfdist.compression.DGC(momentum=0)."
        )

    def density(self, step: Any) -> Any:
        if step is None or not self.ramp_steps:
            return float(self.ratio)
        stage = step * _RAMP // self.ramp_steps
        falling = tf.pow(0.25, tf.cast(tf.clip_by_value(stage, 0, _RAMP) + 1, tf.float32))
        return tf.where(stage < _RAMP, tf.maximum(falling, self.ratio), self.ratio)

    def kept(self, shape: Shape) -> Mapping[str, Shape]:
        return {"error": (count(shape),), "momentum": (count(shape),)}

    def scale(self, gradient: Gradient, hosts: Any) -> Any:
        if self.clip_norm is None:
            return super().scale(gradient, hosts)
        norm = tf.norm(gradient.value)
        limit = tf.cast(self.clip_norm / tf.cast(hosts, tf.float64) ** 0.5, tf.float32)
        scale = limit / tf.maximum(norm, limit)
        # NaN values are sent anyway; they must not affect the others.
        return tf.where(tf.math.is_nan(norm), 1.0, scale)

    def selection(self, gradients: Sequence[Gradient]) -> dict[str, Any]:
        momenta = [g.kept["momentum"].handle for g in gradients]
        return {"momenta": momenta, "factor": self.momentum}
