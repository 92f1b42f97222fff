"""Who keeps a record of what a session waits for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Awaited:
    """What this process waits for: the result of an exchange, or a notice of rank 0.

    Attributes:
        sequence: of an exchange its number, the same on all ranks, from 1; of a notice how many
            with its key there have to be.
        tag: what it is for.
        since_ns: `time.monotonic_ns()` when this process began to wait.
        is_notice: whether it is a notice, which rank 0 alone posts.
    """

    sequence: int
    tag: str
    since_ns: int
    is_notice: bool = False

    @property
    def what(self) -> str:
        """It for people."""
        return f"{'notice' if self.is_notice else 'exchange'} {self.tag!r}"


class ExchangeRecorder(Protocol):
    """Notified of what a session waits for. Its methods return at once and raise nothing."""

    def on_exchange_begin(self, awaited: Awaited) -> None:
        """This process joins an exchange, or begins to wait for a notice."""

    def on_exchange_end(self, awaited: Awaited, failed: bool) -> None:
        """The exchange has its result, or the notice has come; or that has failed."""

    def on_stall(self, message: str) -> None:
        """Something has waited for long, here or on another rank; the message says for whom."""
