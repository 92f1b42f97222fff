"""With which settings each codec is trained, where its defaults are not enough."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tfdist.compression import CODECS, DGC, Codec, Signum

NONE = "none"


@dataclass(frozen=True)
class Recipe:
    """How a codec is trained.

    Attributes:
        settings: of the codec, where they are not its defaults.
        rate: its learning rate is that of the exact run times this.
    """

    settings: dict[str, Any] = field(default_factory=dict)
    rate: float = 1.0

    def __str__(self) -> str:
        """Both, as far as they are not the usual ones."""
        parts = [f"{name}={value}" for name, value in self.settings.items()]
        parts += [f"learning rate * {self.rate:g}"] if self.rate != 1 else []
        return ", ".join(parts) or "defaults"


RECIPES: dict[str, dict[str, Recipe]] = {
    # Adam divides by the usual size of a gradient, and what is sent in one step for many makes it
    # look large: a higher learning rate makes up for that, or to do without error feedback.
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
    """How a codec is trained in a task."""
    return RECIPES[task].get(name, Recipe())


def codec_of(name: str, recipe: Recipe) -> Codec | None:
    """The codec of this name; None for `none`."""
    return None if name == NONE else CODECS[name](**recipe.settings)


def brings_momentum(codec: Codec | None) -> bool:
    """Whether a codec has momentum of its own, so that the optimizer's is to be none."""
    return isinstance(codec, (DGC, Signum)) and codec.momentum > 0
