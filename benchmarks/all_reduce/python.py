"""Checks that a Python interpreter can import a module."""

from __future__ import annotations

import subprocess
from pathlib import Path

from benchmarks.all_reduce.job import MissingError

# With these variables, the ranks import `benchmarks` and tfdist from this checkout.
ENVIRONMENT = {
    "PYTHONPATH": str(Path(__file__).parents[2]),
    "PYTHONUNBUFFERED": "1",
}


def require(python: str, module: str, remedy: str) -> None:
    """Checks that a Python interpreter can import a module.

    Args:
        python: the command or the path of the interpreter.
        module: the name of a top-level module.
        remedy: a text for the exception that explains how to install the module.

    Raises:
        MissingError: the interpreter does not run, or it does not find the module.
    """
    find = f"import importlib.util as u, sys; sys.exit(u.find_spec({module!r}) is None)"
    try:
        done = subprocess.run([python, "-c", find], capture_output=True, timeout=60)
    except OSError as error:
        raise MissingError(f"{python} does not run: {error.strerror}; {remedy}") from None
    if done.returncode:
        raise MissingError(f"{python} has no {module}; {remedy}")
