"""The differences from one process that are allowed, and what has no program."""

from __future__ import annotations

import fnmatch
import functools
import pathlib
import re

# By part: the public classes and functions of Keras without a program, and why.
WITHOUT_A_PROGRAM: dict[str, dict[str, str]] = {
    "layers": {
        "FlaxLayer": "needs JAX, which TensorFlow does not install",
        "InputLayer": "is a part of every functional model",
        "JaxLayer": "needs JAX, which TensorFlow does not install",
        "TFSMLayer": "runs a saved model, which is not trained",
        "TorchModuleWrapper": "needs PyTorch as the backend",
    },
    "losses": {},
    "metrics": {},
    "optimizers": {},
}

_DOCUMENTED = pathlib.Path(__file__).parents[2] / "docs" / "keras.md"
_HEADING = "## Where several workers differ from one process"


def pattern_of(name: str) -> str | None:
    """The pattern in `differences()` of a program that may differ; None if it may not."""
    return next((p for p in differences() if fnmatch.fnmatchcase(name, p)), None)


@functools.cache
def differences() -> dict[str, str]:
    """By pattern of programs' names: why they differ from one process, or are refused.

    The source is the documentation's table: what its first column names as `keras.layers.X` and its
    second one does not call exact.
    """
    section = _DOCUMENTED.read_text().partition(_HEADING)[2].partition("\n## ")[0]
    found = {}
    for row in re.findall(r"^\| (.*) \|$", section, re.MULTILINE):
        what, why, *_ = row.split(" | ")
        for part, symbol in re.findall(r"`keras\.(\w+)\.(\w+)`", what):
            if not why.startswith("exact"):
                found[f"{part}:{symbol}*"] = why
    return found
