"""What the workers write down: a file for each process, a JSON object in each line."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Fed:
    """A step has begun with these rows, of all workers. It may fail."""

    epoch: int
    step: int
    generation: int
    rows: tuple[int, ...]


@dataclass(frozen=True)
class Ended:
    """A step has ended, and left these weights."""

    step: int
    generation: int
    weights: str


@dataclass(frozen=True)
class Finished:
    """The training has ended."""

    weights: str


Record = Fed | Ended | Finished
_KINDS: dict[str, type[Any]] = {kind.__name__: kind for kind in (Fed, Ended, Finished)}


class Recorder:
    """The file of this process. What is written survives any end of it."""

    def __init__(self, folder: str | Path) -> None:
        path = Path(folder) / str(os.getpid())
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def write(self, record: Record) -> None:
        """Adds a line."""
        line = json.dumps({"kind": type(record).__name__, **vars(record)})
        os.write(self._file, f"{line}\n".encode())


def parse(text: str) -> list[Record]:
    """The records of a file, but for a last line that is not whole."""
    return [_record(json.loads(line)) for line in text.split("\n")[:-1]]


def read(folder: str | Path) -> dict[int, Sequence[Record]]:
    """The records of all processes."""
    return {int(path.name): parse(path.read_text()) for path in Path(folder).iterdir()}


def _record(values: dict[str, Any]) -> Record:
    kind = _KINDS[values.pop("kind")]
    if "rows" in values:
        values["rows"] = tuple(values["rows"])
    record: Record = kind(**values)
    return record
