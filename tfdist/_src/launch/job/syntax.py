"""Finds a program that does not compile before any worker starts, without importing it."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Sequence
from importlib.machinery import PathFinder
from pathlib import Path

from tfdist.errors import LaunchError


def check_syntax(command: Sequence[str]) -> None:
    """Compiles the program of a command, if it is a file of Python source.

    Args:
        command: the interpreter, `-u`, and the script or `-m` and a module, then their arguments.

    Raises:
        LaunchError: it does not compile; the message has the line.
    """
    path = _source(command[2:])
    if path is None:
        return
    try:
        source = path.read_bytes()
    except OSError:
        return  # The worker's message says more.
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            compile(source, str(path), "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as error:
        line = f", line {error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
        reason = error.msg if isinstance(error, SyntaxError) else error
        raise LaunchError(f"{path}{line}: {type(error).__name__}: {reason}") from None


def _source(program: Sequence[str]) -> Path | None:
    """The file of a program; None if it is something else, such as an archive, or is not found."""
    if not program[0].startswith("-m"):
        path = Path(program[0])
        return path if path.suffix == ".py" else None
    name = program[1] if program[0] == "-m" else program[0][2:]
    # As `python -m` finds it, but for the packages around it, which would have to be imported.
    folders: Sequence[str] | None = [os.getcwd(), *sys.path[1:]]
    parts = name.split(".")
    for count in range(1, len(parts) + 1):
        spec = PathFinder.find_spec(".".join(parts[:count]), folders)
        if spec is None:
            return None
        folders = spec.submodule_search_locations
        if folders is None and count < len(parts):
            return None
    if folders is not None:
        spec = PathFinder.find_spec(f"{name}.__main__", folders)
    origin = spec.origin if spec is not None else None
    return Path(origin) if origin and origin.endswith(".py") else None
