"""What a pipeline rank does besides computing: sends and receives."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TypeAlias

from tfdist._src.pipeline.plan.action import Action, Value, What


@dataclass(frozen=True)
class Transfer:
    """A value passed between stages on different ranks, for one microbatch.

    Attributes:
        what: "activation", to a later stage, or "gradient", to an earlier one.
        source: the stage that produces it.
        target: the stage that consumes it.
        microbatch: the microbatch it belongs to.
        peer: the rank at the other end.
    """

    what: What
    source: int
    target: int
    microbatch: int
    peer: int

    @functools.cached_property
    def value(self) -> Value:
        """The value as the target sees it: the action with an equal `takes` consumes it."""
        return (self.what, self.target, self.microbatch)


@dataclass(frozen=True)
class Send(Transfer):
    """Hands a value to the channel to `peer` without waiting."""

    def __str__(self) -> str:
        return f"send {self.what} {self.source}>{self.target}.{self.microbatch} to {self.peer}"


@dataclass(frozen=True)
class Receive(Transfer):
    """Posts a receive from `peer` without waiting; the action that consumes the value waits."""

    def __str__(self) -> str:
        return f"receive {self.what} {self.source}>{self.target}.{self.microbatch} from {self.peer}"


Step: TypeAlias = Action | Send | Receive
