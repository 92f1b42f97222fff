"""Deep gradient compression: the largest values of what has added up, with momentum."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfdist.compression.codecs.sparse import Sparsifier
from tfdist.compression.gradient import Gradient, Shape, count

_RAMP = 4  # stages, each sends a quarter of what the one before does


@dataclasses.dataclass(frozen=True)
class DGC(Sparsifier):
    """The largest values of what each host's momentum has added up to, and their indices.

    `u = momentum * u + g; v = v + u`; the largest of `v` are sent, 64 bits each, and `u` and `v`
    become zero there (momentum correction and factor masking). The momentum is the codec's, so the
    optimizer is `keras.optimizers.SGD` without; what stays exact, the steps of a warm-up too, has
    none.

    Args:
        ratio: the share of the values that are sent in the end, in (0, 1].
        momentum: in [0, 1).
        clip_norm: a gradient whose norm is larger is made that long before it is added up, over
            the square root of the number of hosts; None for none.
        ramp_steps: over so many steps after the warm-up the share falls: 1/4, 1/16, 1/64, 1/256.

    Source: Lin et al., "Deep gradient compression: reducing the communication bandwidth for
    distributed training", 2018.
    """

    ratio: float = 0.001
    momentum: float = 0.9
    clip_norm: float | None = None
    ramp_steps: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check("`ratio` is above 0 and at most 1.", self.ratio, holds=0 < self.ratio <= 1)
        self._check("`momentum` is in [0, 1).", self.momentum, holds=0 <= self.momentum < 1)
        positive = self.clip_norm is None or self.clip_norm > 0
        self._check("`clip_norm` is positive or None.", self.clip_norm, holds=positive)
        self._check("`ramp_steps` is 0 or more.", self.ramp_steps, holds=self.ramp_steps >= 0)

    def objection(self, optimizer: Any) -> str:
        of_its_own = getattr(optimizer, "momentum", 0) or hasattr(optimizer, "beta_1")
        if not self.momentum or not of_its_own:
            return ""
        return (
            "DGC brings the momentum along, and the optimizer has another one. Received: "
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

    def scale(self, gradient: Gradient, hosts: int) -> Any:
        if self.clip_norm is None:
            return super().scale(gradient, hosts)
        norm = tf.norm(gradient.value)
        longest = self.clip_norm / hosts**0.5
        scale = longest / tf.maximum(norm, longest)
        # A value that is not a number shows by itself; it must not spoil the others.
        return tf.where(tf.math.is_nan(norm), 1.0, scale)

    def selection(self, gradients: Sequence[Gradient]) -> dict[str, Any]:
        momenta = [g.kept["momentum"].handle for g in gradients]
        return {"momenta": momenta, "factor": self.momentum}
