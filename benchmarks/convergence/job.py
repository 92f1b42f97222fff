"""The description of a training, and its outcome."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Job:
    """One training.

    Attributes:
        task: a key of `TASKS`.
        codec: the name of a codec, or `none`.
        steps: the number of steps.
        seed: the seed of weights and batches.
    """

    task: str
    codec: str
    steps: int
    seed: int


@dataclass(frozen=True)
class Outcome:
    """The outcome of a training.

    Attributes:
        losses: the final losses, by the data that they are computed on.
        weights: all weights of the model, or a hash of them.
        sent_bytes: the bytes sent from this worker's host to the other host.
    """

    losses: dict[str, float]
    weights: Any
    sent_bytes: int = 0
