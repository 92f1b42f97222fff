"""Runs a behaviour on groups of workers and in one process, and compares."""

from __future__ import annotations

import ast
import pathlib
from typing import Any

import numpy as np

from tests.groups import GROUPS

PACKAGE = "tests.strategies.behaviours"


def behaviours(module: str) -> list[str]:
    """The names of a module's public functions, without importing it."""
    path = pathlib.Path(__file__).parent / "behaviours" / f"{module}.py"
    tree = ast.parse(path.read_text())
    return [
        f"{module}:{node.name}"
        for node in tree.body
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")
    ]


_references: dict[tuple[Any, ...], Any] = {}


def check_same_as_alone(group: str, behaviour: str, *args: Any) -> None:
    """Runs a behaviour on a group and in one process, and compares all that it returns."""
    key = (behaviour, *args)
    if key not in _references:
        _references[key] = GROUPS["alone"].run(f"{PACKAGE}.{behaviour}", *args)[0]
    results = GROUPS[group].run(f"{PACKAGE}.{behaviour}", *args)
    for rank, result in enumerate(results):
        assert_close(result, _references[key], f"rank {rank}")
        assert_equal(result.get("weights"), results[0].get("weights"), f"rank {rank}")


def assert_close(actual: Any, expected: Any, where: str, tolerance: float = 1e-5) -> None:
    if isinstance(expected, dict):
        assert set(actual) == set(expected), where
        for key in expected:
            assert_close(actual[key], expected[key], f"{where}: {key}", tolerance)
    elif isinstance(expected, (list, tuple)):
        assert len(actual) == len(expected), where
        for i, pair in enumerate(zip(actual, expected, strict=True)):
            assert_close(*pair, f"{where}[{i}]", tolerance)
    elif isinstance(expected, (str, bool)) or expected is None:
        assert actual == expected, where
    else:
        assert np.shape(actual) == np.shape(expected), where
        if np.asarray(expected).dtype.kind in "SOU":
            assert np.array_equal(actual, expected), where
            return
        np.testing.assert_allclose(actual, expected, rtol=tolerance, atol=tolerance, err_msg=where)


def assert_equal(actual: Any, expected: Any, where: str) -> None:
    if expected is None:
        return
    for i, pair in enumerate(zip(actual, expected, strict=True)):
        assert np.array_equal(*pair), f"{where}: weight {i} differs between workers"
