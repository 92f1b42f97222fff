"""What the ranks say of themselves when rank 0 asks them, from their connections' threads."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

REPORT_LIMIT = 16 * 1024
"""The maximum size of a rank's report, in bytes."""

Reporter = Callable[[], dict[str, Any]]


class OwnReport:
    """The report of this process; empty until a layer above says what is in it."""

    def __init__(self) -> None:
        self._reporter: Reporter = dict

    def made_by(self, reporter: Reporter) -> None:
        """Sets what makes the report.

        Args:
            reporter: returns a small JSON-serializable dict. It runs in a thread that other workers
                wait for, so it must not block.
        """
        self._reporter = reporter

    def encoded(self) -> bytes:
        """The report as JSON; an object with the single key "error" if it cannot be had."""
        try:
            report = json.dumps(self._reporter()).encode()
        except Exception as error:  # the thread of the connections must survive
            return _error(f"its report failed ({type(error).__name__})")
        return report if len(report) <= REPORT_LIMIT else _error("its report is too long")


def _error(text: str) -> bytes:
    return json.dumps({"error": text}).encode()


class Gathering:
    """The reports of all ranks, as they come in.

    Args:
        number: tells late answers to an earlier question from those to this one.
        ranks: those that are asked.
        on_complete: called, in the thread of the connections, once none of them is missing.
    """

    def __init__(self, number: int, ranks: Iterable[int], on_complete: Callable[[], object]):
        self.number = number
        self.reports: dict[int, bytes] = {}
        self._missing = set(ranks)
        self._on_complete = on_complete

    @property
    def is_complete(self) -> bool:
        """Whether nothing more will come."""
        return not self._missing

    def add(self, rank: int, report: bytes) -> None:
        """Adds a rank's report, which may be malformed."""
        if rank in self._missing and len(report) <= REPORT_LIMIT:
            self.reports[rank] = report
        self.give_up(rank)

    def give_up(self, rank: int) -> None:
        """Notes that nothing more comes from a rank."""
        if rank in self._missing:
            self._missing.discard(rank)
            if not self._missing:
                self._on_complete()


@dataclass(frozen=True)
class Presence:
    """What rank 0 knows of a rank by its connection.

    Attributes:
        silence: seconds since it was last heard of; None if it is not connected.
        gone: why it is not, such as "has left the job".
    """

    silence: float | None
    gone: str = ""
