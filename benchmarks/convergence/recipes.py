"""The settings of each codec in training, if its defaults are not sufficient."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tfdist.compression import CODECS, DGC, Codec, Signum

NONE = "none"


@dataclass(frozen=True)
class Recipe:
    """The settings of a codec in a training.

    Attributes:
        settings: the settings of the codec that differ from its defaults.
        rate: the learning rate, as a multiple of the exact training's.
    """

    settings: dict[str, Any] = field(default_factory=dict)
    rate: float = 1.0

    def __str__(self) -> str:
        """Describes the settings and the rate if they are not the defaults."""
        parts = [f"{name}={value}" for name, value in self.settings.items()]
        parts += [f"learning rate * {self.rate:g}"] if self.rate != 1 else []
        return ", ".join(parts) or "defaults"


RECIPES: dict[str, dict[str, Recipe]] = {
    # Adam divides by the usual magnitude of a gradient. With error feedback, one step may send the
    # accumulated values of many steps, which makes this magnitude large. A higher learning rate
    # compensates for this; the alternative is to omit error feedback.
    "char_lm": {
        "onebit": Recipe({"error_feedback": False}, rate=1.5),
        "ef_signsgd": Recipe({"error_feedback": False}, rate=1.5),
        "signum": Recipe({"momentum": 0.8}, rate=0.3),
        "topk": Recipe({"ratio": 0.25}, rate=2),
        "randomk": Recipe({"ratio": 0.25, "error_feedback": False}),
        "threshold": Recipe({"threshold": 2e-4}),
        "dgc": Recipe({"momentum": 0.0, "ratio": 0.25}, rate=2),
        "powersgd": Recipe({"rank": 8}),
    },
    "digits": {
        "onebit": Recipe({"block": 32, "warmup_steps": 75}),
        "ef_signsgd": Recipe({"block": 32, "warmup_steps": 75}),
        "signsgd": Recipe(rate=0.005),
        "signum": Recipe(rate=0.01),
        "topk": Recipe({"ratio": 0.2}),
        "randomk": Recipe({"ratio": 0.5, "error_feedback": False}),
        "dgc": Recipe({"ratio": 0.05}, rate=4),
    },
}


def recipe_of(task: str, name: str) -> Recipe:
    """Returns the settings of a codec in a task."""
    return RECIPES[task].get(name, Recipe())


def codec_of(name: str, recipe: Recipe) -> Codec | None:
    """Returns the codec of this name; None for `none`."""
    return None if name == NONE else CODECS[name](**recipe.settings)


def brings_momentum(codec: Codec | None) -> bool:
    """Whether a codec applies momentum, so that the optimizer must not."""
    return isinstance(codec, (DGC, Signum)) and codec.momentum > 0
