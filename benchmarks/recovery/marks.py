"""The notes of the workers. Each worker process has a file with a line for each event."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

START, STEP, FAILED = "start", "step", "failed"


@dataclass(frozen=True)
class Mark:
    """An event of a worker process.

    Attributes:
        time: the time of the event on the monotonic clock. All processes of a machine have the same
            clock.
        event: the kind of event: `START` at the start of the process, `STEP` at the end of a step,
            or `FAILED` if a step or the whole training run has failed.
        number: for `START`, the initial rank of the worker. For `STEP`, the number of the step.
    """

    time: float
    event: str
    number: int = 0


class Notes:
    """The notes of this process. The constructor records the start of the process.

    Each line is written to the file immediately, so it remains even if the process is killed.

    Args:
        folder: the folder for the files of all worker processes.
        rank: the initial rank of this worker.
    """

    def __init__(self, folder: str, rank: int) -> None:
        path = Path(folder) / str(os.getpid())
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self.write(START, rank)

    def write(self, event: str, number: int = 0) -> None:
        """Records an event with the current time."""
        os.write(self._file, f"{time.monotonic():.6f} {event} {number}\n".encode())


def parse(text: str) -> tuple[Mark, ...]:
    """Returns the events in the text of a file. Ignores an incomplete last line."""
    lines = text.split("\n")[:-1]
    return tuple(
        Mark(float(moment), event, int(number)) for moment, event, number in map(str.split, lines)
    )
