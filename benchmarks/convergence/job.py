"""What is trained, and what comes of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Job:
    """One training.

    Attributes:
        task: a key of `TASKS`.
        codec: a name, or `none`.
        steps: of the optimizer.
        seed: of weights and batches.
    """

    task: str
    codec: str
    steps: int
    seed: int


@dataclass(frozen=True)
class Outcome:
    """What comes of a training.

    Attributes:
        losses: in the end, by what they are taken on.
        weights: all of the model's; or a text that is another one for others.
        sent_bytes: that crossed from this worker's host to the other meanwhile.
    """

    losses: dict[str, float]
    weights: Any
    sent_bytes: int = 0
