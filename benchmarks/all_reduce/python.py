"""Other Pythons and what they have installed."""

from __future__ import annotations

import subprocess
from pathlib import Path

from benchmarks.all_reduce.job import MissingError

# The ranks import `benchmarks` and, where they need it, tfdist from this checkout.
ENVIRONMENT = {
    "PYTHONPATH": str(Path(__file__).parents[2]),
    "PYTHONUNBUFFERED": "1",
}


def require(python: str, module: str, remedy: str) -> None:
    """Makes sure that a Python has a module.

    Args:
        python: the interpreter.
        module: its name, without a dot.
        remedy: what to do where it is missing.

    Raises:
        MissingError: it is not there; with the remedy.
    """
    find = f"import importlib.util as u, sys; sys.exit(u.find_spec({module!r}) is None)"
    try:
        done = subprocess.run([python, "-c", find], capture_output=True, timeout=60)
    except OSError as error:
        raise MissingError(f"{python} does not run: {error.strerror}; {remedy}") from None
    if done.returncode:
        raise MissingError(f"{python} has no {module}; {remedy}")
