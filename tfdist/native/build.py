"""A finished build: a folder with the libraries and a file that says what they are."""

from __future__ import annotations

import json
import os
import secrets
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from tfdist.native.compiler import Compiler
from tfdist.native.recipe import CORE, OPS, Recipe

MANIFEST = "build.json"


@dataclass(frozen=True)
class Build:
    """Where the libraries are, and how they were made.

    Attributes:
        folder: where they are.
        tensorflow: the version of TensorFlow that they are for.
        compiler: name and version.
        libc: the C library that they were linked with, "" where it has no version.
        seconds: what compiling took.
        finished: when that ended, in seconds since 1970.
        stamp: tells this build from all others, also of the same key.
        sizes: the libraries and their bytes.
    """

    folder: Path
    tensorflow: str
    compiler: str
    libc: str
    seconds: float
    finished: float
    stamp: str
    sizes: dict[str, int]

    @property
    def core(self) -> Path:
        """The library without TensorFlow."""
        return self.folder / CORE

    @property
    def ops(self) -> Path | None:
        """The library with TensorFlow's ops, if there are any."""
        return self.folder / OPS if OPS in self.sizes else None

    @property
    def libraries(self) -> list[Path]:
        """All of them."""
        return [self.folder / name for name in self.sizes]

    def runs_here(self) -> bool:
        """Whether this machine's C library is as new as the one it was linked with.

        A home folder or an image can carry a build to an older system.
        """
        name, _, number = self.libc.partition(" ")
        here, _, newest = libc().partition(" ")
        return name == here and _numbers(number) <= _numbers(newest)


def write(folder: Path, recipe: Recipe, compiler: Compiler, seconds: float) -> None:
    """Describes what was compiled into a folder."""
    sizes = {name: (folder / name).stat().st_size for name in (CORE, OPS) if name in _files(folder)}
    build = Build(
        folder=folder,
        tensorflow=recipe.tensorflow.version,
        compiler=str(compiler),
        libc=libc(),
        seconds=round(seconds, 1),
        finished=time.time(),
        stamp=secrets.token_hex(8),
        sizes=sizes,
    )
    values = asdict(build)
    del values["folder"]
    (folder / MANIFEST).write_text(json.dumps(values, indent=1))


def read(folder: Path) -> Build | None:
    """The build in a folder; None if there is none, or if a part of it is missing or cut off."""
    try:
        build = Build(folder=folder, **json.loads((folder / MANIFEST).read_text()))
        sizes = {name: (folder / name).stat().st_size for name in build.sizes}
    except (OSError, ValueError, TypeError, AttributeError):
        return None
    return build if sizes == build.sizes and CORE in sizes else None


def libc() -> str:
    """Name and version of this machine's C library.

    Example:
        >>> libc()  # doctest: +SKIP
        'glibc 2.36'
    """
    try:
        return os.confstr("CS_GNU_LIBC_VERSION") or ""
    except (ValueError, OSError):
        return ""


def _files(folder: Path) -> set[str]:
    return {entry.name for entry in folder.iterdir()}


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".") if part.isdecimal())
