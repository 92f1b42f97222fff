"""One worker's part of a snapshot: a file of named arrays and a JSON document.

The file is a NumPy `.npz` archive, with a checksum for each entry.
"""

import contextlib
import io
import json
import os
import uuid
import zipfile
import zlib
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import tensorflow as tf


def write_atomically(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Writes a file under a temporary name, syncs it to the disk, and renames it.

    Args:
        path: the file, in an existing folder.
        write: writes the contents to the open file.

    Raises:
        OSError: the file cannot be written. No partial file remains.
    """
    unfinished = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")
    try:
        with unfinished.open("wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, path)
    except BaseException:
        with contextlib.suppress(OSError):
            unfinished.unlink()
        raise
    sync_folder(path.parent)


def make_folder(folder: Path) -> None:
    """Creates a folder and its missing parents, and syncs their names to the disk.

    Raises:
        OSError: a folder cannot be created.
    """
    if not folder.parent.exists():
        make_folder(folder.parent)
    folder.mkdir(exist_ok=True)
    sync_folder(folder.parent)


def sync_folder(folder: Path) -> None:
    """Syncs the names of a folder's files to the disk, if the file system supports it."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


Array = np.ndarray[Any, Any]

_FORMAT = 1
_HEADER = "header"
_DAMAGES = (
    OSError,
    ValueError,
    LookupError,
    EOFError,
    NotImplementedError,  # A damaged header may name an unknown compression.
    RuntimeError,  # A damaged header may say that the file is encrypted.
    zipfile.BadZipFile,
    zlib.error,
)


@dataclass(frozen=True)
class StoredArray:
    """An array of the state of training, or some elements of the array.

    Attributes:
        key: the array's name.
        values: the whole array, or a range of elements of the flattened array.
        start: the index of the first element of such a range; None for the whole array.
    """

    key: str
    values: Array
    start: int | None = None


class DamagedError(Exception):
    """A part cannot be read; the message names the part and gives the reason."""


def write_part(path: Path, stored: Sequence[StoredArray], document: dict[str, Any]) -> None:
    """Writes a part atomically.

    Args:
        path: the file.
        stored: the arrays, of any dtype that a TensorFlow variable can have.
        document: data that JSON can represent.

    Raises:
        OSError: the file cannot be written.
    """
    write_atomically(path, lambda file: _write(file, stored, document))


def part_bytes(stored: Sequence[StoredArray], document: dict[str, Any]) -> bytes:
    """Returns the bytes of the file that `write_part` would write."""
    buffer = io.BytesIO()
    _write(buffer, stored, document)
    return buffer.getvalue()


def _write(file: BinaryIO, stored: Sequence[StoredArray], document: dict[str, Any]) -> None:
    entries = [[p.key, p.start, p.values.dtype.name] for p in stored]
    header = json.dumps({"format": _FORMAT, "pieces": entries, "document": document}).encode()
    arrays: dict[str, Any] = {str(i): _bits(p.values) for i, p in enumerate(stored)}
    arrays[_HEADER] = np.frombuffer(header, np.uint8)
    np.savez(file, **arrays)


class PartFile:
    """Reads a part of a snapshot; each array is read when it is needed.

    Args:
        source: the path of the file, or the contents of the file.
        name: the name of the part in messages.

    Attributes:
        document: the document that was passed to `write_part`.

    Raises:
        DamagedError: the source is not a complete part.
    """

    def __init__(self, source: Path | bytes, name: str) -> None:
        self._name = name
        try:
            opened = io.BytesIO(source) if isinstance(source, bytes) else source
            self._file = np.load(opened, allow_pickle=False)
            header = json.loads(self._file[_HEADER].tobytes())
            if header["format"] != _FORMAT:
                raise ValueError(f"it has the format {header['format']}, not {_FORMAT}")
            self.document: dict[str, Any] = header["document"]
            self._entries = [(str(k), s, str(d)) for k, s, d in header["pieces"]]
        except _DAMAGES as error:
            raise DamagedError(_damage(name, error)) from error

    @property
    def keys(self) -> list[tuple[str, int | None]]:
        """The key and start of each stored array."""
        return [(key, start) for key, start, _ in self._entries]

    def values(self, number: int) -> Array:
        """Returns the elements of a stored array, by its index in `keys`.

        Raises:
            DamagedError: the checksum does not match, or the file has been deleted.
        """
        try:
            values: Array = self._file[str(number)]
        except _DAMAGES as error:
            raise DamagedError(_damage(self._name, error)) from error
        return values.view(_dtype(self._entries[number][2]))

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


def _damage(name: str, error: BaseException) -> str:
    return f"{name} is damaged: {str(error).splitlines()[0] if str(error) else repr(error)}"


def _bits(values: Array) -> Array:
    # NumPy's format supports neither bfloat16 nor float8.
    plain = np.ascontiguousarray(values).reshape(values.shape)
    return plain if plain.dtype.kind in "biufcS" else plain.view(f"u{plain.dtype.itemsize}")


def _dtype(name: str) -> np.dtype[Any]:
    dtype: np.dtype[Any] = np.dtype(tf.as_dtype(name).as_numpy_dtype)
    return dtype


class PartIndex:
    """Finds arrays in the parts of a snapshot.

    Args:
        files: maps the rank that wrote each available part to the part.
        size: the number of workers that took the snapshot.
    """

    def __init__(self, files: Mapping[int, PartFile], size: int) -> None:
        self.size = size
        self._files = dict(sorted(files.items()))
        self._locations: defaultdict[str, list[tuple[int | None, int, int]]] = defaultdict(list)
        for rank, file in self._files.items():
            for number, (key, start) in enumerate(file.keys):
                self._locations[key].append((start, rank, number))

    def document(self, rank: int) -> dict[str, Any] | None:
        """Returns the document of a worker; None if the worker's part is missing."""
        file = self._files.get(rank)
        return None if file is None else file.document

    @property
    def ranks(self) -> list[int]:
        """The ranks of the available parts."""
        return list(self._files)

    @property
    def keys(self) -> list[str]:
        """The names of the arrays."""
        return list(self._locations)

    def __contains__(self, key: object) -> bool:
        return key in self._locations

    def whole(self, key: str, shape: tuple[int, ...] | None = None) -> Array:
        """Returns a whole array, which may be assembled from ranges in several parts.

        Args:
            key: the name of the array.
            shape: the shape for an assembled array. Without a shape, or if the number of elements
                does not match, the array is flat.

        Raises:
            KeyError: no part contains the array, or a range of it.
            DamagedError: a part cannot be read.
        """
        locations = self._locations.get(key)
        if not locations:
            raise KeyError(key)
        start, rank, number = locations[0]
        if start is None:
            return self._files[rank].values(number)
        slices, end = [], 0
        for start, rank, number in sorted(
            locations, key=lambda location: (location[0] or 0, location[1])
        ):
            if (start or 0) > end:
                raise KeyError(f"{key}[{end}:{start}]")
            values = self._files[rank].values(number)
            slices.append(values[end - (start or 0) :])
            end = max(end, (start or 0) + values.size)
        flat = np.concatenate(slices)
        fits = shape is not None and flat.size == int(np.prod(shape))
        return flat.reshape(shape) if fits else flat

    def elements(self, key: str, start: int, stop: int) -> Array:
        """Returns the elements `[start, stop)` of a flattened array.

        Raises:
            KeyError: the elements are in no part.
            DamagedError: a part cannot be read.
        """
        for location, rank, number in self._locations.get(key, []):
            if location == start:
                values = self._files[rank].values(number)
                if values.size == stop - start:
                    return values
        found = self.whole(key).reshape(-1)
        if found.size < stop:
            raise KeyError(f"{key}[{found.size}:{stop}]")
        return found[start:stop]

    def check(self, prefixes: tuple[str, ...]) -> None:
        """Reads all arrays with one of these prefixes of names, to verify that they are readable.

        Raises:
            DamagedError: a part cannot be read.
        """
        for key, locations in self._locations.items():
            if key.startswith(prefixes):
                for _, rank, number in locations:
                    self._files[rank].values(number)

    def close(self) -> None:
        """Closes the files."""
        for file in self._files.values():
            file.close()
