"""What a rank of the pipeline does besides computing: it sends and receives."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TypeAlias

from tfdist.pipeline.plan.action import Action, Value, What


@dataclass(frozen=True)
class Transfer:
    """What one stage has for another that is on another rank, for one microbatch.

    Attributes:
        what: "activation", to a later stage, or "gradient", to an earlier one.
        source: the stage that made it.
        target: the stage that takes it.
        microbatch: whose it is.
        peer: the rank at the other end.
    """

    what: What
    source: int
    target: int
    microbatch: int
    peer: int

    @functools.cached_property
    def value(self) -> Value:
        """What it is for the target: the action with an equal `takes` takes it."""
        return (self.what, self.target, self.microbatch)


@dataclass(frozen=True)
class Send(Transfer):
    """Hands a value to the channel to `peer`, and goes on."""

    def __str__(self) -> str:
        return f"send {self.what} {self.source}>{self.target}.{self.microbatch} to {self.peer}"


@dataclass(frozen=True)
class Receive(Transfer):
    """Makes ready for a value from `peer`, and goes on; the action that takes it waits for it."""

    def __str__(self) -> str:
        return f"receive {self.what} {self.source}>{self.target}.{self.microbatch} from {self.peer}"


Step: TypeAlias = Action | Send | Receive
