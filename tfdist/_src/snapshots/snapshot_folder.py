"""The folder of a training's snapshots: a folder for each step, a file in it for each worker.

Workers may share it, or each host may have its own.
"""

from __future__ import annotations

import os
import re
import shutil
import time
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

from tfdist._src.snapshots.part_file import make_folder

_SNAPSHOT = re.compile(r"step-(\d+)-([0-9a-f]+)")
_PART = re.compile(r"rank-(\d+)-of-(\d+)\.npz")


class SnapshotId(NamedTuple):
    """Which snapshot: ordered by step.

    Attributes:
        step: the number of steps that have been trained.
        run: tells the snapshots of one call of `fit` from those of another; later calls sort later.
        size: the number of workers.
    """

    step: int
    run: str
    size: int


def new_run() -> str:
    """A name for a call of `fit`."""
    return f"{time.time_ns() // 1_000_000:012x}"


class SnapshotFolder:
    """A directory of snapshots.

    Args:
        path: the directory, which need not exist.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def at(cls, directory: str | os.PathLike[str]) -> SnapshotFolder:
        """The folder that a user names.

        Raises:
            ValueError: it is no local path.
        """
        path = os.fspath(directory)
        if not path or "://" in path:
            raise ValueError(
                f"`directory` must be a local path. Received: {path!r}. Mount remote storage, or "
                "use a local disk of each host."
            )
        return cls(Path(path).absolute())

    def part(self, snapshot: SnapshotId, rank: int) -> Path:
        """The file of a worker's part."""
        return self._of(snapshot) / f"rank-{rank}-of-{snapshot.size}.npz"

    def prepare(self, snapshot: SnapshotId) -> None:
        """Makes the directory of a snapshot.

        Raises:
            OSError: it cannot be made.
        """
        make_folder(self._of(snapshot))

    def parts(self) -> dict[SnapshotId, list[int]]:
        """The snapshots that can be seen from here, and the ranks whose parts are there."""
        found: defaultdict[SnapshotId, list[int]] = defaultdict(list)
        for folder in self._folders():
            step, run = folder.name.removeprefix("step-").split("-")
            for part in filter(None, (_PART.fullmatch(path.name) for path in _inside(folder))):
                found[SnapshotId(int(step), run, int(part[2]))].append(int(part[1]))
        return {snapshot: sorted(ranks) for snapshot, ranks in found.items()}

    def forget_earlier_than(self, snapshot: SnapshotId) -> None:
        """Deletes the snapshots before one, and unfinished files in them."""
        for path in self._folders():
            if path.name < self._of(snapshot).name:
                shutil.rmtree(path, ignore_errors=True)

    def forget_later_than(self, snapshot: SnapshotId) -> None:
        """Deletes the snapshots after one, which could not be resumed from."""
        for path in self._folders():
            if path.name > self._of(snapshot).name:
                shutil.rmtree(path, ignore_errors=True)

    def clear(self) -> None:
        """Deletes all snapshots, and the directory if nothing else is in it."""
        for path in sorted(self._folders()):  # The newest last: it is complete without the others.
            shutil.rmtree(path, ignore_errors=True)
        try:
            self.path.rmdir()
        except OSError:  # Other files are in it, or another worker has deleted it.
            pass

    def _of(self, snapshot: SnapshotId) -> Path:
        return self.path / f"step-{snapshot.step:010d}-{snapshot.run}"

    def _folders(self) -> list[Path]:
        return [path for path in _inside(self.path) if _SNAPSHOT.fullmatch(path.name)]


def _inside(folder: Path) -> list[Path]:
    """The entries of a directory: none if another worker has deleted it meanwhile."""
    try:
        return list(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []
