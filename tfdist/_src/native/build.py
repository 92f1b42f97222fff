"""A finished build: a directory with the libraries and a manifest that describes them."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from tfdist._src.native.compiler import Compiler
from tfdist._src.native.recipe import CORE, OPS, Recipe

MANIFEST = "build.json"


@dataclass(frozen=True)
class Build:
    """The location of the libraries, and how they were built.

    Attributes:
        folder: the directory that contains them.
        tensorflow: the version of TensorFlow that they were built for.
        compiler: its name and version.
        libc: the C library that they were linked against; "" if it has no version.
        seconds: the compilation time.
        finished: when it finished, in seconds since the epoch.
        stamp: unique to this build, even among builds with the same key.
        digests: library name -> SHA-256 of the file.
    """

    folder: Path
    tensorflow: str
    compiler: str
    libc: str
    seconds: float
    finished: float
    stamp: str
    digests: dict[str, str]

    @property
    def core(self) -> Path:
        """The library without TensorFlow."""
        return self.folder / CORE

    @property
    def ops(self) -> Path | None:
        """The library with the TensorFlow ops; None if there are no ops."""
        return self.folder / OPS if OPS in self.digests else None

    @property
    def libraries(self) -> list[Path]:
        """The paths of all libraries."""
        return [self.folder / name for name in self.digests]

    def runs_here(self) -> bool:
        """Whether this host's C library is at least as new as the one it was linked against.

        A home directory or an image can bring a build to an older system.
        """
        name, _, number = self.libc.partition(" ")
        here, _, newest = libc().partition(" ")
        return name == here and _numbers(number) <= _numbers(newest)


def write(folder: Path, recipe: Recipe, compiler: Compiler, seconds: float) -> None:
    """Writes the manifest of a build."""
    digests = {name: _digest(folder / name) for name in (CORE, OPS) if name in _files(folder)}
    build = Build(
        folder=folder,
        tensorflow=recipe.tensorflow.version,
        compiler=str(compiler),
        libc=libc(),
        seconds=round(seconds, 1),
        finished=time.time(),
        stamp=secrets.token_hex(8),
        digests=digests,
    )
    values = asdict(build)
    del values["folder"]
    (folder / MANIFEST).write_text(json.dumps(values, indent=1))


def read(folder: Path) -> Build | None:
    """The build in a directory; None if there is none, or it is incomplete or truncated."""
    try:
        build = Build(folder=folder, **json.loads((folder / MANIFEST).read_text()))
        digests = {name: _digest(folder / name) for name in build.digests}
    except (OSError, ValueError, TypeError, AttributeError):
        return None
    return build if digests == build.digests and CORE in digests else None


def libc() -> str:
    """Name and version of this host's C library.

    Example:
        >>> libc()  # doctest: +SKIP
        'glibc 2.36'
    """
    try:
        return os.confstr("CS_GNU_LIBC_VERSION") or ""
    except (ValueError, OSError):
        return ""


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _files(folder: Path) -> set[str]:
    return {entry.name for entry in folder.iterdir()}


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".") if part.isdecimal())
