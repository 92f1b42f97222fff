"""The notes of workers during training: a file for each process, with a line for each event."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

START, STEP, FAILED = "start", "step", "failed"


@dataclass(frozen=True)
class Mark:
    """An event.

    Attributes:
        time: the time on the monotonic clock, which all processes of a machine share.
        event: `START`, with the rank; `STEP`, with the number of the step that has ended; or
            `FAILED`, if a step has failed.
        number: the rank or the step.
    """

    time: float
    event: str
    number: int = 0


class Notes:
    """The file of this process. Written lines remain if the process ends in any way.

    Args:
        folder: the folder for the files of all processes.
        rank: the initial rank of this worker.
    """

    def __init__(self, folder: str, rank: int) -> None:
        path = Path(folder) / str(os.getpid())
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self.write(START, rank)

    def write(self, event: str, number: int = 0) -> None:
        """Writes an event that has just happened."""
        os.write(self._file, f"{time.monotonic():.6f} {event} {number}\n".encode())


def parse(text: str) -> tuple[Mark, ...]:
    """Returns the marks of a file; ignores an incomplete last line."""
    lines = text.split("\n")[:-1]
    return tuple(
        Mark(float(moment), event, int(number)) for moment, event, number in map(str.split, lines)
    )
