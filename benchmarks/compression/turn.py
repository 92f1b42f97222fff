"""The answer of a worker to a request for steps."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Turn:
    """The measurements of several steps, on one worker or on a team of workers.

    Attributes:
        seconds: the total time of the steps.
        sent_bytes: the number of bytes that the worker sends to other hosts in these steps, as
            counted by the core. For a team, this is the mean over the workers.
        loss: the loss on the held-out rows after the steps.
        chosen: the name of the codec in use after the steps.
    """

    seconds: float
    sent_bytes: float
    loss: float
    chosen: str
