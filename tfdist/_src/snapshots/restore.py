"""Chooses a snapshot to resume from, and reads it on all workers together.

Workers may share the snapshot's directory, or each host may have its own.
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

from tfdist._src.log import logger
from tfdist._src.snapshots.part_file import Array, DamagedError, PartFile, PartIndex, make_folder
from tfdist._src.snapshots.worker_state import OF_WORKER, HeldVariable, fitting, worker_key
from tfdist._src.snapshots.workers import Workers, broadcast_bytes
from tfdist.errors import SnapshotError

_SNAPSHOT = re.compile(r"step-(\d+)-([0-9a-f]+)")
_PART = re.compile(r"rank-(\d+)-of-(\d+)\.npz")


class SnapshotId(NamedTuple):
    """Identifies a snapshot. Identities are ordered by step.

    Attributes:
        step: the number of trained steps.
        run: identifies the call of `fit` that took the snapshot. Later calls have greater values.
        size: the number of workers that took the snapshot.
    """

    step: int
    run: str
    size: int


def new_run() -> str:
    """Returns the `SnapshotId.run` of a new call of `fit`."""
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
        """Returns the folder at a path that the user has passed.

        Raises:
            ValueError: the path is not local.
        """
        path = os.fspath(directory)
        if not path or "://" in path:
            raise ValueError(
                f"`directory` must be a local path. Received: {path!r}. Mount remote storage, or "
                "use a local disk of each host."
            )
        return cls(Path(path).absolute())

    def part(self, snapshot: SnapshotId, rank: int) -> Path:
        """Returns the path of a worker's part."""
        return self._of(snapshot) / f"rank-{rank}-of-{snapshot.size}.npz"

    def prepare(self, snapshot: SnapshotId) -> None:
        """Creates the directory of a snapshot.

        Raises:
            OSError: the directory cannot be created.
        """
        make_folder(self._of(snapshot))

    def parts(self) -> dict[SnapshotId, list[int]]:
        """Returns the snapshots that this worker can see, and the ranks of the parts in each."""
        found: defaultdict[SnapshotId, list[int]] = defaultdict(list)
        for folder in self._folders():
            step, run = folder.name.removeprefix("step-").split("-")
            for part in filter(None, (_PART.fullmatch(path.name) for path in _inside(folder))):
                found[SnapshotId(int(step), run, int(part[2]))].append(int(part[1]))
        return {snapshot: sorted(ranks) for snapshot, ranks in found.items()}

    def delete_before(self, snapshot: SnapshotId) -> None:
        """Deletes all snapshots before the given one, including their unfinished files."""
        for path in self._folders():
            if path.name < self._of(snapshot).name:
                shutil.rmtree(path, ignore_errors=True)

    def delete_after(self, snapshot: SnapshotId) -> None:
        """Deletes all snapshots after the given one, because training cannot resume from them."""
        for path in self._folders():
            if path.name > self._of(snapshot).name:
                shutil.rmtree(path, ignore_errors=True)

    def clear(self) -> None:
        """Deletes all snapshots, and the directory if it is then empty."""
        # The newest snapshot is deleted last, because training can resume from it alone.
        for path in sorted(self._folders()):
            shutil.rmtree(path, ignore_errors=True)
        try:
            self.path.rmdir()
        except OSError:  # The directory has other files, or another worker has deleted it.
            pass

    def _of(self, snapshot: SnapshotId) -> Path:
        return self.path / f"step-{snapshot.step:010d}-{snapshot.run}"

    def _folders(self) -> list[Path]:
        return [path for path in _inside(self.path) if _SNAPSHOT.fullmatch(path.name)]


def _inside(folder: Path) -> list[Path]:
    """Returns the entries of a directory; an empty list if another worker has deleted it."""
    try:
        return list(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []


Inventory = Mapping[SnapshotId, Sequence[int]]
"""The snapshots that a worker can see, and the ranks whose parts it can read."""


@dataclass(frozen=True)
class Candidate:
    """A snapshot from which training may resume.

    Attributes:
        snapshot: the identity of the snapshot.
        holders: maps the rank that wrote each existing part to the present workers that can read
            the part, in rank order.
        workers: the present number of workers.
    """

    snapshot: SnapshotId
    holders: Mapping[int, Sequence[int]]
    workers: int

    @property
    def is_complete(self) -> bool:
        """Whether all parts of the snapshot exist."""
        return len(self.holders) == self.snapshot.size

    @property
    def missing(self) -> list[int]:
        """The ranks that have no part in the snapshot."""
        return [rank for rank in range(self.snapshot.size) if rank not in self.holders]

    @property
    def to_send(self) -> dict[int, int]:
        """Maps each part that some workers cannot read to the worker that sends the part."""
        return {
            part: holders[0]
            for part, holders in sorted(self.holders.items())
            if len(holders) < self.workers
        }


def candidates(inventories: Sequence[Inventory]) -> list[Candidate]:
    """Returns the snapshots that the workers can assemble, best first.

    Complete snapshots precede incomplete snapshots, which lack worker-local state. Otherwise, newer
    snapshots precede older snapshots.

    Args:
        inventories: for each worker, in rank order, the snapshots that the worker can see.

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


_LOOKED_AT = 5  # The number of the newest snapshots in which `_last_complete` looks.
POSITION = "position of the data of worker"
FRESH = "beginning of the data of worker"
VALIDATION = "validation data of worker"
_READ_LATER = POSITION, FRESH, VALIDATION, "compression/", "callback "
"""Prefixes of the names of arrays that are not variables of the model."""


@dataclass
class Restored:
    """A snapshot that has been read.

    Attributes:
        folder: the folder of the snapshot.
        snapshot: the identity of the snapshot.
        document: the document of this worker if `is_own`, else the first available document.
        is_own: whether this worker wrote the document, in a job of the same size.
        values: the values of the variables, except for variables that the snapshot lacks.
        parts: the parts of the snapshot, which contain all other state. Code that reads this state
            closes the parts.
        lost: the names of the state that could not be restored, for messages.
    """

    folder: Path
    snapshot: SnapshotId
    document: dict[str, Any]
    is_own: bool
    values: list[tuple[HeldVariable, Array]]
    parts: PartIndex
    lost: list[str]

    def assign(self) -> None:
        """Sets all variables."""
        for held, value in self.values:
            held.assign(value)


def read_newest(
    folder: SnapshotFolder,
    held: Callable[[Container[str]], Sequence[HeldVariable]],
    workers: Workers,
    optimizers: dict[str, list[str]],
    *,
    whole_parts: Collection[str],
) -> Restored | None:
    """Reads the newest snapshot that the workers can assemble.

    If a snapshot is damaged, the function logs a warning and reads the previous one. All workers
    must call this function.

    Args:
        folder: this worker's folder, which may be shared.
        held: a function that returns this worker's variables, given the names in the snapshot.
        workers: all workers.
        optimizers: the classes of the model's optimizers, by the optimizers' names.
        whole_parts: the names of the parts of the state that each worker holds entirely, as
            returned by `parts_held_entirely`.

    Returns:
        The snapshot; None if there is no snapshot to resume from.

    Raises:
        SnapshotError: the snapshots are of another model, or all snapshots are damaged.
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
    # Incomplete snapshots after the step `last` are unfinished: some workers never wrote a part.
    found = [c for c in several if c.is_complete or c.snapshot.step <= last]
    if several and not found and workers.rank == 0:
        logger.warning(
            "training was interrupted before the first snapshot was complete, so there is no "
            "snapshot to resume from."
        )
    for candidate in found:
        restored, problem = _read(folder, candidate, held, workers, optimizers, whole_parts)
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
            logger.warning(
                f"the snapshot of step {candidate.snapshot.step} cannot be used: "
                f"{damages[0]}. Trying the previous one."
            )
    if found:
        raise SnapshotError(
            f"None of the snapshots in {str(folder.path)!r} can be read. Restore the files, or "
            "delete the directory to train from the beginning."
        )
    return None


def _last_complete(folder: SnapshotFolder, parts: Mapping[SnapshotId, Sequence[int]]) -> int:
    """Returns the step of the last snapshot that all workers wrote, according to local files."""
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
    held: Callable[[Container[str]], Sequence[HeldVariable]],
    workers: Workers,
    optimizers: dict[str, list[str]],
    whole_parts: Collection[str],
) -> tuple[Restored | None, tuple[str, str] | None]:
    """Reads a snapshot.

    Returns:
        The snapshot and None; or None and the problem, as its kind and its description.
    """
    snapshot = candidate.snapshot
    try:
        sources = _sources(folder, candidate, workers)
        files = {
            rank: PartFile(source, f"the part of worker {rank} in step {snapshot.step}")
            for rank, source in sources.items()
        }
        parts = PartIndex(files, snapshot.size)
        is_own = snapshot.size == workers.size and workers.rank in files
        first = next(iter(files.values()))
        document = files[workers.rank].document if is_own else first.document
        theirs = document["optimizers"]
        if theirs != optimizers:
            raise ValueError(
                f"they are of {_classes(theirs)}, and this model has {_classes(optimizers)}"
            )
        lost = [f"the worker-local state of worker {rank}" for rank in candidate.missing]
        values = []
        mine = held(parts)
        for one in mine:
            value = _value_of(one, parts, workers, is_own)
            if value is None:
                lost.append(one.key)
            else:
                values.append((one, fitting(one, value)))
        _check_all_taken(parts, mine, whole_parts)
        parts.check(_READ_LATER)
        return Restored(folder.path, snapshot, document, is_own, values, parts, lost), None
    except (DamagedError, OSError) as error:
        return None, ("damaged", str(error))
    except KeyError as error:
        if candidate.is_complete:
            return None, ("foreign", f"they have no {error.args[0]}")
        return None, ("damaged", f"{error.args[0]} is in none of the remaining files")
    except ValueError as error:
        return None, ("foreign", str(error))


def _classes(optimizers: dict[str, list[str]]) -> str:
    return "the optimizer " + " and ".join("/".join(names) for names in optimizers.values())


def _check_all_taken(
    parts: PartIndex, held: Sequence[HeldVariable], whole_parts: Collection[str]
) -> None:
    """Checks that this worker has a variable for each stored weight and slot of `whole_parts`.

    Raises:
        ValueError: the snapshot is of a model with more variables.
    """
    taken = {one.key for one in held}
    keys = {key.partition(OF_WORKER)[0] for key in parts.keys}
    left = sorted(k for k in keys if k.rpartition("/")[0] in whole_parts and k not in taken)
    if left:
        raise ValueError(f"they also have {left[0]}")


def _value_of(held: HeldVariable, parts: PartIndex, workers: Workers, is_own: bool) -> Array | None:
    """Returns the value of a variable; None if the value was lost with a worker.

    Raises:
        KeyError: the snapshot lacks the variable.
    """
    if held.is_worker_local and is_own and worker_key(held, workers.rank) in parts:
        return parts.whole(worker_key(held, workers.rank))
    if held.start is not None:
        return parts.elements(held.key, held.start, held.start + int(np.prod(held.shape)))
    if held.is_worker_local and held.receives_sum is None:
        return None
    total = _total(held, parts)
    # One worker gets the sum over all workers, and the others get zeros.
    return np.zeros_like(total) if held.is_worker_local and not held.receives_sum else total


def _total(held: HeldVariable, parts: PartIndex) -> Array:
    """Returns the common value of a variable, or the sum of the workers' values.

    Raises:
        KeyError: the snapshot contains neither of them, and the variable is not worker-local.
    """
    if held.key in parts:
        return parts.whole(held.key, held.shape)
    total, found = np.zeros(held.shape, held.variable.dtype.as_numpy_dtype), held.is_worker_local
    for rank in parts.ranks:
        device = 0
        while (key := f"{held.key} of worker {rank}, device {device}") in parts:
            total, found = total + fitting(held, parts.whole(key)), True
            device += 1
    if not found:
        raise KeyError(held.key)
    return total.astype(held.variable.dtype.as_numpy_dtype)


def _sources(folder: SnapshotFolder, candidate: Candidate, workers: Workers) -> dict[int, Any]:
    """Maps the rank of each part to the part's path, or to its contents if a worker sends them."""
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
                contents = b""  # All workers will then report that the part is damaged.
        sources[rank] = broadcast_bytes(contents, sender, workers)
    return sources


def names(lost: Iterable[str]) -> str:
    """Abbreviates a list of names, for a message."""
    found = list(dict.fromkeys(lost))
    more = f" and {len(found) - 3} more" if len(found) > 3 else ""
    return ", ".join(found[:3]) + more
