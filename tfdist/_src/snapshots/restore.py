"""Chooses a snapshot to resume from, and reads it on all workers together.

Workers may share it, or each host may have its own.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tfdist._src.cluster.net.wait_messages import say
from tfdist._src.snapshots.held_state import OF_WORKER, Held, fitting, own_key
from tfdist._src.snapshots.part_file import Array, DamagedError, PartFile, Parts, make_folder
from tfdist._src.snapshots.workers import Workers, broadcast_bytes
from tfdist.errors import SnapshotError

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


Inventory = Mapping[SnapshotId, Sequence[int]]
"""The snapshots that a worker can see, and the ranks whose parts it can read."""


@dataclass(frozen=True)
class Candidate:
    """A snapshot that may be resumed from.

    Attributes:
        snapshot: which one.
        holders: for each part that exists, by its rank when it was written, the workers of today
            that can read it, in order.
        workers: how many workers there are today.
    """

    snapshot: SnapshotId
    holders: Mapping[int, Sequence[int]]
    workers: int

    @property
    def is_complete(self) -> bool:
        """Whether all of its parts exist."""
        return len(self.holders) == self.snapshot.size

    @property
    def missing(self) -> list[int]:
        """The ranks whose parts are nowhere."""
        return [rank for rank in range(self.snapshot.size) if rank not in self.holders]

    @property
    def to_send(self) -> dict[int, int]:
        """For each part that some worker cannot read, the worker that sends it."""
        return {
            part: holders[0]
            for part, holders in sorted(self.holders.items())
            if len(holders) < self.workers
        }


def candidates(inventories: Sequence[Inventory]) -> list[Candidate]:
    """The snapshots that the workers can put together, the best first.

    Complete ones come before others, since these lack what a worker alone held; then the newest.

    Args:
        inventories: what each worker can see, in rank order.

    Example:
        >>> old, new = SnapshotId(10, "a", 2), SnapshotId(20, "a", 2)
        >>> [c.snapshot.step for c in candidates([{old: [0, 1], new: [0]}, {old: [1]}])]
        [10, 20]
    """
    found: defaultdict[SnapshotId, defaultdict[int, list[int]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for worker, inventory in enumerate(inventories):
        for snapshot, parts in inventory.items():
            for part in parts:
                found[snapshot][part].append(worker)
    several = [Candidate(s, dict(holders), len(inventories)) for s, holders in found.items()]
    return sorted(several, key=lambda c: (c.is_complete, c.snapshot), reverse=True)


_LOOKED_AT = 5  # snapshots
POSITION = "position of the data of worker"
FRESH = "beginning of the data of worker"
VALIDATION = "validation data of worker"
_READ_LATER = POSITION, FRESH, VALIDATION, "compression/", "callback "
"""What the names of arrays begin with that are not the model's variables."""


@dataclass
class Restored:
    """A snapshot that has been read.

    Attributes:
        folder: where it was read.
        snapshot: which one.
        document: this worker's document, or the first there is if this worker is new.
        is_own: whether it is this worker's own, from a job of as many workers.
        values: for each variable, what it is to be set to; those that the snapshot lacks are left
            out.
        parts: everything else, until it is closed.
        lost: what could not be taken, for messages.
    """

    folder: Path
    snapshot: SnapshotId
    document: dict[str, Any]
    is_own: bool
    values: list[tuple[Held, Array]]
    parts: Parts
    lost: list[str]

    def assign(self) -> None:
        """Sets all variables."""
        for held, value in self.values:
            held.assign(value)


def read_newest(
    folder: SnapshotFolder,
    held: Callable[[Container[str]], Sequence[Held]],
    workers: Workers,
    optimizers: dict[str, list[str]],
    *,
    wholes: Collection[str],
) -> Restored | None:
    """Reads the newest snapshot that the workers can put together; called by all of them.

    A damaged snapshot costs a warning, and the one before is read.

    Args:
        folder: this worker's folder, which may be shared.
        held: returns the variables of this worker.
        workers: all of them.
        optimizers: the classes of the model's optimizers, by their names.
        wholes: what each worker holds as a whole, of `"model"` and the optimizers' names.

    Returns:
        None if there is no snapshot.

    Raises:
        SnapshotError: the snapshots are those of another model, or all are damaged.
    """
    parts = folder.parts()
    mine = {json.dumps(s): ranks for s, ranks in parts.items()}
    texts = workers.exchange("snapshots", json.dumps([mine, _last_complete(folder, parts)]))
    answers = [json.loads(text) for text in texts]
    inventories = [
        {SnapshotId(*json.loads(key)): ranks for key, ranks in found.items()}
        for found, _ in answers
    ]
    last = max((step for _, step in answers), default=-1)
    several = candidates(inventories)
    # Later incomplete ones were never finished: some worker had not written its part yet.
    found = [c for c in several if c.is_complete or c.snapshot.step <= last]
    if several and not found and workers.rank == 0:
        say(
            "tfdist: the first snapshot was not finished when the training was interrupted, so "
            "there is none to resume from."
        )
    for candidate in found:
        restored, problem = _read(folder, candidate, held, workers, optimizers, wholes)
        problems = [json.loads(t) for t in workers.exchange("snapshot read", json.dumps(problem))]
        foreign = [text for kind, text in filter(None, problems) if kind == "foreign"]
        if foreign:
            raise SnapshotError(
                f"The snapshots in {str(folder.path)!r} are of another model: {foreign[0]}. "
                "Choose another directory, or delete that one to train from the beginning."
            )
        damages = [text for _, text in filter(None, problems)]
        if not damages:
            return restored
        if workers.rank == 0:
            say(
                f"tfdist: the snapshot of step {candidate.snapshot.step} cannot be used: "
                f"{damages[0]}. The one before is tried."
            )
    if found:
        raise SnapshotError(
            f"None of the snapshots in {str(folder.path)!r} can be read. Restore the files, or "
            "delete the directory to train from the beginning."
        )
    return None


def _last_complete(folder: SnapshotFolder, parts: Mapping[SnapshotId, Sequence[int]]) -> int:
    """The step of the last snapshot that all workers had written, as far as files here know."""
    steps = [-1]
    for snapshot in sorted(parts, reverse=True)[:_LOOKED_AT]:
        for rank in parts[snapshot][:1]:
            try:
                part = PartFile(folder.part(snapshot, rank), "a part")
            except DamagedError:
                continue
            steps.append(part.document.get("complete") or -1)
            part.close()
    return max(steps)


def _read(
    folder: SnapshotFolder,
    candidate: Candidate,
    held: Callable[[Container[str]], Sequence[Held]],
    workers: Workers,
    optimizers: dict[str, list[str]],
    wholes: Collection[str],
) -> tuple[Restored | None, tuple[str, str] | None]:
    """Reads a snapshot; the second value tells what kind of problem there is, and which."""
    snapshot = candidate.snapshot
    try:
        sources = _sources(folder, candidate, workers)
        files = {
            rank: PartFile(source, f"the part of worker {rank} in step {snapshot.step}")
            for rank, source in sources.items()
        }
        parts = Parts(files, snapshot.size)
        is_own = snapshot.size == workers.size and workers.rank in files
        first = next(iter(files.values()))
        document = files[workers.rank].document if is_own else first.document
        theirs = document["optimizers"]
        if theirs != optimizers:
            raise ValueError(
                f"they are of {_classes(theirs)}, and this model has {_classes(optimizers)}"
            )
        lost = [f"what worker {rank} alone held" for rank in candidate.missing]
        values = []
        mine = held(parts)
        for one in mine:
            value = _value_of(one, parts, workers, is_own)
            if value is None:
                lost.append(one.key)
            else:
                values.append((one, fitting(one, value)))
        _check_all_taken(parts, mine, wholes)
        parts.check(_READ_LATER)
        return Restored(folder.path, snapshot, document, is_own, values, parts, lost), None
    except (DamagedError, OSError) as error:
        return None, ("damaged", str(error))
    except KeyError as error:
        if candidate.is_complete:
            return None, ("foreign", f"they have no {error.args[0]}")
        return None, ("damaged", f"{error.args[0]} is in none of the files that are left")
    except ValueError as error:
        return None, ("foreign", str(error))


def _classes(optimizers: dict[str, list[str]]) -> str:
    return "the optimizer " + " and ".join("/".join(names) for names in optimizers.values())


def _check_all_taken(parts: Parts, held: Sequence[Held], wholes: Collection[str]) -> None:
    """Checks that this worker has a use for all weights and slots of what it holds as a whole.

    Raises:
        ValueError: the snapshot is of a model with more of them.
    """
    taken = {one.key for one in held}
    keys = {key.partition(OF_WORKER)[0] for key in parts.keys}
    left = sorted(k for k in keys if k.rpartition("/")[0] in wholes and k not in taken)
    if left:
        raise ValueError(f"they have {left[0]} besides")


def _value_of(held: Held, parts: Parts, workers: Workers, is_own: bool) -> Array | None:
    """The value of a variable; None if a worker that is gone took it along.

    Raises:
        KeyError: the snapshot lacks it.
    """
    if held.is_own and is_own and own_key(held, workers.rank) in parts:
        return parts.whole(own_key(held, workers.rank))
    if held.start is not None:
        return parts.elements(held.key, held.start, held.start + int(np.prod(held.shape)))
    if held.is_own and held.sum_here is None:
        return None
    total = _total(held, parts)
    # What has been added up on all workers goes to one of them.
    return np.zeros_like(total) if held.is_own and not held.sum_here else total


def _total(held: Held, parts: Parts) -> Array:
    """The value that all workers held, or the sum of what each of them held.

    Raises:
        KeyError: the snapshot has neither, where it must.
    """
    if held.key in parts:
        return parts.whole(held.key, held.shape)
    total, found = np.zeros(held.shape, held.variable.dtype.as_numpy_dtype), held.is_own
    for rank in parts.ranks:
        device = 0
        while (key := f"{held.key} of worker {rank}, device {device}") in parts:
            total, found = total + fitting(held, parts.whole(key)), True
            device += 1
    if not found:
        raise KeyError(held.key)
    return total.astype(held.variable.dtype.as_numpy_dtype)


def _sources(folder: SnapshotFolder, candidate: Candidate, workers: Workers) -> dict[int, Any]:
    """Each part: its path, or its contents if another worker had to send it."""
    to_send = candidate.to_send
    sources: dict[int, Any] = {
        rank: folder.part(candidate.snapshot, rank) for rank in sorted(candidate.holders)
    }
    for rank, sender in to_send.items():
        contents = b""
        if sender == workers.rank:
            try:
                contents = sources[rank].read_bytes()
            except OSError:
                contents = b""  # Its readers find it damaged.
        sources[rank] = broadcast_bytes(contents, sender, workers)
    return sources


def names(lost: Iterable[str]) -> str:
    """A few of many names, for a message."""
    found = list(dict.fromkeys(lost))
    more = f" and {len(found) - 3} more" if len(found) > 3 else ""
    return ", ".join(found[:3]) + more
