"""Compiles the C programs of some backends when they are needed."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

from benchmarks.all_reduce.job import MissingError

RANKS = Path(__file__).parent / "ranks"


def build(compiler: str, sources: Sequence[Path], output: Path, *options: str) -> Path:
    """Compiles sources into one program or library, unless the output file already exists.

    Args:
        compiler: the compiler's command, such as `gcc`, `g++` or `mpicc`.
        sources: the source files, in C or C++.
        output: the path of the program or library.
        options: further arguments of the compiler; they follow the sources on the command line.

    Returns:
        The path of the output.

    Raises:
        MissingError: the compiler is not installed, or it cannot compile the sources.
    """
    if output.exists():
        return output
    command = [compiler, "-O3", *map(str, sources), "-o", str(output), *options]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    except FileNotFoundError:
        raise MissingError(f"there is no {compiler}; apt-get install build-essential") from None
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if "error" in line]
        first = (errors or done.stderr.splitlines() or ["no message"])[0]
        raise MissingError(f"{compiler} fails: {first}")
    return output
