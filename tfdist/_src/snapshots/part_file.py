"""One worker's part of a snapshot: a file of named arrays and a JSON document.

It is a NumPy `.npz` archive, whose entries carry checksums.
"""

from __future__ import annotations

import io
import json
import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import tensorflow as tf

from tfdist._src.snapshots.atomic_file import write_atomically

Array = np.ndarray[Any, Any]

_FORMAT = 1
_HEADER = "header"
_DAMAGES = (
    OSError,
    ValueError,
    LookupError,
    EOFError,
    NotImplementedError,  # of a damaged header: a compression that does not exist
    RuntimeError,  # the same: an encrypted file
    zipfile.BadZipFile,
    zlib.error,
)


@dataclass(frozen=True)
class Piece:
    """Some elements of an array of the training's state, or all of them.

    Attributes:
        key: the array's name.
        values: the elements: the whole array, or a flat part of it.
        start: the index of a flat part's first element in the flattened array; None if whole.
    """

    key: str
    values: Array
    start: int | None = None


class DamagedError(Exception):
    """A part cannot be read; the message says which, and why."""


def write_part(path: Path, pieces: Sequence[Piece], document: dict[str, Any]) -> None:
    """Writes a part atomically.

    Args:
        path: the file.
        pieces: the arrays, of any type that TensorFlow's variables have.
        document: what JSON can represent.

    Raises:
        OSError: the file cannot be written.
    """
    write_atomically(path, lambda file: _write(file, pieces, document))


def part_bytes(pieces: Sequence[Piece], document: dict[str, Any]) -> bytes:
    """The contents of a part that is not written to a file."""
    buffer = io.BytesIO()
    _write(buffer, pieces, document)
    return buffer.getvalue()


def _write(file: BinaryIO, pieces: Sequence[Piece], document: dict[str, Any]) -> None:
    entries = [[p.key, p.start, p.values.dtype.name] for p in pieces]
    header = json.dumps({"format": _FORMAT, "pieces": entries, "document": document}).encode()
    arrays: dict[str, Any] = {str(i): _bits(p.values) for i, p in enumerate(pieces)}
    arrays[_HEADER] = np.frombuffer(header, np.uint8)
    np.savez(file, **arrays)


class PartFile:
    """Reads a part; its arrays only when they are asked for.

    Args:
        source: the file, or its contents.
        name: what messages call it.

    Attributes:
        document: as passed to `write_part`.

    Raises:
        DamagedError: it is not a complete part.
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
        """The key and start of each piece."""
        return [(key, start) for key, start, _ in self._entries]

    def values(self, number: int) -> Array:
        """The elements of a piece, by its position in `keys`.

        Raises:
            DamagedError: the checksum does not match, or the file is gone.
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
    # NumPy's format knows no bfloat16 and no float8.
    plain = np.ascontiguousarray(values).reshape(values.shape)
    return plain if plain.dtype.kind in "biufcS" else plain.view(f"u{plain.dtype.itemsize}")


def _dtype(name: str) -> np.dtype[Any]:
    dtype: np.dtype[Any] = np.dtype(tf.as_dtype(name).as_numpy_dtype)
    return dtype
