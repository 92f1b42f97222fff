"""Who keeps a record of what a session does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Awaited:
    """An exchange that this process has joined and whose result has not come.

    Attributes:
        sequence: its number, the same on all ranks, from 1.
        tag: what it is for.
        since_ns: `time.monotonic_ns()` when this process joined it.
    """

    sequence: int
    tag: str
    since_ns: int

    @property
    def what(self) -> str:
        """The exchange for people."""
        return f"exchange {self.tag!r}"


class Observer(Protocol):
    """Notified of what happens in a session. Its methods return at once and raise nothing."""

    def on_exchange_begin(self, exchange: Awaited) -> None:
        """This process joins an exchange."""

    def on_exchange_end(self, exchange: Awaited, failed: bool) -> None:
        """The exchange has its result, or has failed."""

    def on_stall(self, message: str) -> None:
        """An exchange has waited for long, here or on other ranks; the message names for whom."""
