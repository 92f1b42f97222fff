"""What a worker answers when it has taken some steps."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Turn:
    """Some steps of one worker, or of a team.

    Attributes:
        seconds: that they took.
        sent_bytes: that crossed from this worker's host to others, counted by the core.
        loss: afterwards, on rows that are not trained on.
        chosen: the codec that compresses by then.
    """

    seconds: float
    sent_bytes: float
    loss: float
    chosen: str
