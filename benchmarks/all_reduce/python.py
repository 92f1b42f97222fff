"""Checks that other Python interpreters have a module."""

from __future__ import annotations

import subprocess
from pathlib import Path

from benchmarks.all_reduce.job import MissingError

# The ranks import `benchmarks` and, if they need it, tfdist from this checkout.
ENVIRONMENT = {
    "PYTHONPATH": str(Path(__file__).parents[2]),
    "PYTHONUNBUFFERED": "1",
}


def require(python: str, module: str, remedy: str) -> None:
    """Checks that a Python has a module.

    Args:
        python: the interpreter.
        module: the module's name, without a dot.
        remedy: how to install the module.

    Raises:
        MissingError: the module is missing; the message contains the remedy.
    """
    find = f"import importlib.util as u, sys; sys.exit(u.find_spec({module!r}) is None)"
    try:
        done = subprocess.run([python, "-c", find], capture_output=True, timeout=60)
    except OSError as error:
        raise MissingError(f"{python} does not run: {error.strerror}; {remedy}") from None
    if done.returncode:
        raise MissingError(f"{python} has no {module}; {remedy}")
