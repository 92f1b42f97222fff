"""A worker's answer after it has taken some steps."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Turn:
    """Some steps of one worker, or of a team.

    Attributes:
        seconds: the time of the steps.
        sent_bytes: the bytes sent from this worker's host to others, as counted by the core.
        loss: the loss after the steps, on rows that are not trained on.
        chosen: the codec in use after the steps.
    """

    seconds: float
    sent_bytes: float
    loss: float
    chosen: str
