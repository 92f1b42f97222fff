"""What a rank of the pipeline computes: one pass of one microbatch through one stage."""

from __future__ import annotations

import enum
import functools
from dataclasses import dataclass
from typing import Literal, TypeAlias

# What one stage sends to another: its output to later stages, or gradients to earlier ones.
What: TypeAlias = Literal["activation", "gradient"]

# What a stage takes for a microbatch, of one other stage or of several: (what, stage, microbatch).
Value: TypeAlias = tuple[What, int, int]


class Kind(enum.Enum):
    """The passes of a microbatch through a stage.

    A backward pass is either whole (`BACKWARD`) or in two parts: `INPUT_GRADIENT`, for which the
    stage before is waiting, and later `WEIGHT_GRADIENT`, for which nobody is.
    """

    FORWARD = "F"
    BACKWARD = "B"
    INPUT_GRADIENT = "I"
    WEIGHT_GRADIENT = "W"

    @property
    def carries(self) -> What | None:
        """What such a pass takes from other stages, and what it makes for others; None for W."""
        return _CARRIES.get(self)

    # Members are singletons; the standard hash goes through Python for each look-up.
    __hash__ = object.__hash__


_CARRIES: dict[Kind, What] = {
    Kind.FORWARD: "activation",
    Kind.BACKWARD: "gradient",
    Kind.INPUT_GRADIENT: "gradient",
}


@dataclass(frozen=True)
class Action:
    """One pass of one microbatch through one stage.

    Attributes:
        kind: which pass.
        stage: the stage's number, from 0 at the model's inputs.
        microbatch: the microbatch's number, from 0.

    Example:
        >>> str(Action(Kind.FORWARD, stage=3, microbatch=5))
        'F3.5'
    """

    kind: Kind
    stage: int
    microbatch: int

    @functools.cached_property
    def takes(self) -> Value | None:
        """What this action takes from other stages, if they have anything for it; None for W."""
        what = self.kind.carries
        return None if what is None else (what, self.stage, self.microbatch)

    def __str__(self) -> str:
        return f"{self.kind.value}{self.stage}.{self.microbatch}"
