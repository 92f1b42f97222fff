"""The state of the native collectives, without compiling or loading anything."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tfdist._src.native import builder
from tfdist._src.native import compiler as compilers
from tfdist._src.native.build import Build
from tfdist._src.native.recipe import SOURCE
from tfdist._src.options import NativeOptions
from tfdist.errors import NativeUnavailableError


@dataclass(frozen=True)
class Status:
    """The state of the native collectives.

    Attributes:
        enabled: whether they may be used.
        build: the libraries that would be loaded; None if they are not compiled yet.
        compiler: name and version of the compiler that would be used; "" if none.
        problem: why they can be neither loaded nor compiled, with the remedy; "" if they can.
    """

    enabled: bool
    build: Build | None = None
    compiler: str = ""
    problem: str = ""

    def __str__(self) -> str:
        """The state in one line.

        Example:
            >>> str(Status(True, compiler="g++ 12.2.0"))
            'not compiled yet; will be compiled on first use by g++ 12.2.0'
        """
        if not self.enabled:
            return "switched off by TFDIST_NATIVE=0"
        if self.build:
            return f"compiled: {self.build.folder} ({self.build.compiler})"
        if self.problem:
            return "unavailable"
        return f"not compiled yet; will be compiled on first use by {self.compiler}"


def status(options: NativeOptions | None = None, source: Path = SOURCE) -> Status:
    """Reports which libraries would be loaded, or why none can be.

    Args:
        options: the compiler and the cache; from the environment by default.
        source: the directory with the C++ sources.

    Raises:
        ValueError: a setting is invalid.
    """
    options = options or NativeOptions.from_environment()
    if not options.enabled:
        return Status(enabled=False)
    try:
        build = builder.find(options, source)
        compiler = "" if build else str(compilers.find(options.compiler))
    except NativeUnavailableError as error:
        return Status(enabled=True, problem=str(error))
    return Status(enabled=True, build=build, compiler=compiler)
