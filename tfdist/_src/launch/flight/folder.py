"""The flight logs in a folder."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from tfdist._src.launch.flight.log import Log, parse

_NAME = re.compile(r"flight-rank(\d+)\.json")


@dataclass(frozen=True)
class Folder:
    """What a folder holds.

    Attributes:
        path: the folder.
        logs: the logs of one job, by rank.
        skipped: a line for each file that could not be used.
    """

    path: Path
    logs: tuple[Log, ...]
    skipped: tuple[str, ...]


def read(path: Path) -> Folder:
    """Reads every `flight-rank*.json` of a folder; other files are ignored.

    Logs of another generation of the workers, or of another job, than that of the newest log, and
    second logs of a rank are skipped.

    Raises:
        OSError: the folder cannot be read.
    """
    names = (_NAME.fullmatch(file.name) for file in path.iterdir())
    logs: list[tuple[str, Log]] = []
    skipped = []
    for name in sorted((int(match[1]), match[0]) for match in names if match):
        try:
            logs.append((name[1], parse((path / name[1]).read_bytes())))
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else str(error)
            skipped.append(f"{name[1]}: {reason}")
    newest = max((log for _, log in logs), key=lambda log: log.unix_ns, default=None)
    used: dict[int, Log] = {}
    for file, log in logs:
        if newest is not None and log.generation != newest.generation:
            skipped.append(
                f"{file}: it is of generation {log.generation} of the workers, the newest log of "
                f"{newest.generation}"
            )
        elif newest is not None and log.size != newest.size:
            skipped.append(
                f"{file}: it is of a job of {log.size} workers, the newest log of {newest.size}"
            )
        elif used.setdefault(log.rank, log) is not log:
            skipped.append(f"{file}: it is a second log of rank {log.rank}")
    return Folder(path, tuple(used[rank] for rank in sorted(used)), tuple(skipped))
