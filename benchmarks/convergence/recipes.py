"""The settings with which each codec is trained, if its defaults do not reach the exact loss."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tfdist.compression import CODECS, DGC, Codec, Signum

NONE = "none"


@dataclass(frozen=True)
class Recipe:
    """The settings with which a codec is trained.

    Attributes:
        settings: the arguments of the codec that differ from their defaults.
        rate: the factor by which the learning rate of the exact training is multiplied.
    """

    settings: dict[str, Any] = field(default_factory=dict)
    rate: float = 1.0

    def __str__(self) -> str:
        """Describes the settings that differ from the defaults; `defaults` if there are none."""
        parts = [f"{name}={value}" for name, value in self.settings.items()]
        parts += [f"learning rate * {self.rate:g}"] if self.rate != 1 else []
        return ", ".join(parts) or "defaults"


RECIPES: dict[str, dict[str, Recipe]] = {
    # Adam divides a gradient by its usual magnitude. With error feedback, one step may send the
    # accumulated values of many steps, which increases this magnitude and makes later updates too
    # small. A higher learning rate compensates for this. The alternative is no error feedback.
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
    """Returns the settings with which a codec is trained in a task."""
    return RECIPES[task].get(name, Recipe())


def codec_of(name: str, recipe: Recipe) -> Codec | None:
    """Returns the codec with this name and these settings; None for `none`."""
    return None if name == NONE else CODECS[name](**recipe.settings)


def brings_momentum(codec: Codec | None) -> bool:
    """Whether a codec applies momentum, so that the optimizer must not apply momentum as well."""
    return isinstance(codec, (DGC, Signum)) and codec.momentum > 0
