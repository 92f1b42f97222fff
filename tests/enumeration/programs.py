"""Finds programs by name, and compares them with one process."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import numpy as np

from tests.enumeration.training import Program
from tests.harness.groups import GROUPS
from tests.harness.references import reference
from tests.strategy.comparison import assert_close, assert_equal

PARTS = (
    "layers",
    "losses",
    "metrics",
    "optimizers",
    "patterns",
    "data",
    "callbacks",
    "components",
    "random_programs",
)
HUB = ("keras_hub", "keras_rs")
if all(importlib.util.find_spec(package) for package in HUB):
    PARTS = (*PARTS, "hub")
RUN = f"{__name__}:run"


def names(part: str, only_default: bool = False) -> list[str]:
    """The names of a part's programs, as `run` takes them."""
    module = importlib.import_module(f"tests.enumeration.{part}")
    return [f"{part}:{name}" for name in (module.DEFAULT if only_default else module.PROGRAMS)]


def covering_names(part: str) -> list[str]:
    """The names of programs that together cover a part; all of them if it has few."""
    module = importlib.import_module(f"tests.enumeration.{part}")
    return [f"{part}:{name}" for name in getattr(module, "COVERING", module.PROGRAMS)]


def find(name: str) -> Program:
    part, _, program = name.partition(":")
    module = importlib.import_module(f"tests.enumeration.{part}")
    return module.PROGRAMS[program]


def run(strategy: Any, name: str) -> dict[str, Any]:
    """Runs a program on a worker, or in one process without a strategy."""
    return find(name)(strategy)


def difference(name: str, group: str = "2") -> str:
    """Describes how a program on a group of workers differs from one process; "" if it does not."""
    expected = reference(RUN, name)
    check_sound(expected, name)
    try:
        results = GROUPS[group].run(RUN, name)
        for rank, result in enumerate(results):
            assert_close(result, expected, f"rank {rank}")
            assert_equal(result["weights"], results[0]["weights"], f"rank {rank}")
    except AssertionError as error:
        return str(error).strip() or "values differ"
    return ""


def check_sound(result: dict[str, Any], name: str) -> None:
    """Raises ValueError if a result of one process is not finite, and so proves nothing."""
    for path, value in _leaves(result):
        if np.asarray(value).dtype.kind in "fc" and not np.all(np.isfinite(value)):
            raise ValueError(f"{name} gives {path} that is not finite. Received: {value}")


def _leaves(value: Any, path: str = "") -> Any:
    if isinstance(value, dict):
        for key, part in value.items():
            yield from _leaves(part, f"{path}/{key}")
    elif isinstance(value, (list, tuple)):
        for i, part in enumerate(value):
            yield from _leaves(part, f"{path}/{i}")
    elif value is not None and not isinstance(value, str):
        yield path, value
