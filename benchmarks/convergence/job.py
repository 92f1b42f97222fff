"""The description of a training run, and the type of its outcome."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Job:
    """The description of one training run.

    Attributes:
        task: a key of `TASKS`.
        codec: the name of a codec, or `none` for exact training.
        steps: the number of steps.
        seed: the seed of the initial weights and of the batches.
    """

    task: str
    codec: str
    steps: int
    seed: int


@dataclass(frozen=True)
class Outcome:
    """The outcome of one training run on one worker.

    Attributes:
        losses: the final losses. The key is the data on which the loss is computed, such as "held
            out".
        weights: all weights of the model. A worker sends a hash of the weights to the driver.
        sent_bytes: the number of bytes that this worker has sent to the other host.
    """

    losses: dict[str, float]
    weights: Any
    sent_bytes: int = 0
