"""The unit of work of a pipeline: one pass of one microbatch through one stage."""

from __future__ import annotations

import enum
import functools
from dataclasses import dataclass
from typing import Literal, TypeAlias

# What one stage sends to another: outputs to later stages, or gradients to earlier ones.
What: TypeAlias = Literal["activation", "gradient"]

# A stage's input for a microbatch, from one or more other stages: (what, stage, microbatch).
Value: TypeAlias = tuple[What, int, int]


class Kind(enum.Enum):
    """The passes of a microbatch through a stage.

    A backward pass is either whole (`BACKWARD`) or split in two: `INPUT_GRADIENT`, which the
    previous stage waits for, and later `WEIGHT_GRADIENT`, which nothing waits for.
    """

    FORWARD = "F"
    BACKWARD = "B"
    INPUT_GRADIENT = "I"
    WEIGHT_GRADIENT = "W"

    @property
    def carries(self) -> What | None:
        """What such a pass receives from other stages and sends to others; None for W."""
        return _CARRIES.get(self)

    # Members are singletons; the default hash runs Python code on every lookup.
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
        kind: the kind of pass.
        stage: the stage's index, from 0 at the model's inputs.
        microbatch: the microbatch's index, from 0.

    Example:
        >>> str(Action(Kind.FORWARD, stage=3, microbatch=5))
        'F3.5'
    """

    kind: Kind
    stage: int
    microbatch: int

    @functools.cached_property
    def takes(self) -> Value | None:
        """This action's input from other stages, if it has any; None for W."""
        what = self.kind.carries
        return None if what is None else (what, self.stage, self.microbatch)

    def __str__(self) -> str:
        return f"{self.kind.value}{self.stage}.{self.microbatch}"
