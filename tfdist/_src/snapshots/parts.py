"""The parts of one snapshot, read as a whole: each array by its name, whoever wrote it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import numpy as np

from tfdist._src.snapshots.part_file import Array, PartFile


class Parts:
    """Finds arrays in the parts of a snapshot.

    Args:
        files: the parts, by the rank that wrote them.
        size: the number of workers that the snapshot is of.
    """

    def __init__(self, files: Mapping[int, PartFile], size: int) -> None:
        self.size = size
        self._files = dict(sorted(files.items()))
        self._places: defaultdict[str, list[tuple[int | None, int, int]]] = defaultdict(list)
        for rank, file in self._files.items():
            for number, (key, start) in enumerate(file.keys):
                self._places[key].append((start, rank, number))

    def document(self, rank: int) -> dict[str, Any] | None:
        """A worker's document; None if its part is missing."""
        file = self._files.get(rank)
        return None if file is None else file.document

    @property
    def ranks(self) -> list[int]:
        """The ranks whose parts there are."""
        return list(self._files)

    @property
    def keys(self) -> list[str]:
        """The names of the arrays."""
        return list(self._places)

    def __contains__(self, key: object) -> bool:
        return key in self._places

    def whole(self, key: str, shape: tuple[int, ...] | None = None) -> Array:
        """An array that is stored as a whole, or else the one put together from flat pieces.

        Args:
            key: its name.
            shape: the shape of the latter, if they have as many elements; by default it is flat.

        Raises:
            KeyError: it is in no part, or not all of it.
            DamagedError: a part cannot be read.
        """
        places = self._places.get(key)
        if not places:
            raise KeyError(key)
        start, rank, number = places[0]
        if start is None:
            return self._files[rank].values(number)
        pieces, end = [], 0
        for start, rank, number in sorted(places, key=lambda place: (place[0] or 0, place[1])):
            if (start or 0) > end:
                raise KeyError(f"{key}[{end}:{start}]")
            values = self._files[rank].values(number)
            pieces.append(values[end - (start or 0) :])
            end = max(end, (start or 0) + values.size)
        flat = np.concatenate(pieces)
        fits = shape is not None and flat.size == int(np.prod(shape))
        return flat.reshape(shape) if fits else flat

    def elements(self, key: str, start: int, stop: int) -> Array:
        """Elements `[start, stop)` of a flattened array.

        Raises:
            KeyError: they are in no part.
            DamagedError: a part cannot be read.
        """
        for place, rank, number in self._places.get(key, []):
            if place == start:
                values = self._files[rank].values(number)
                if values.size == stop - start:
                    return values
        found = self.whole(key).reshape(-1)
        if found.size < stop:
            raise KeyError(f"{key}[{found.size}:{stop}]")
        return found[start:stop]

    def check(self, prefixes: tuple[str, ...]) -> None:
        """Reads the arrays whose names begin with one of these, to find out whether it is possible.

        Raises:
            DamagedError: a part cannot be read.
        """
        for key, places in self._places.items():
            if key.startswith(prefixes):
                for _, rank, number in places:
                    self._files[rank].values(number)

    def close(self) -> None:
        """Closes the files."""
        for file in self._files.values():
            file.close()
