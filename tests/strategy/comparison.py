"""Runs a behaviour on groups of workers and in one process, and compares."""

from __future__ import annotations

import ast
import pathlib
from typing import Any

import numpy as np

from tests.harness.groups import GROUPS
from tests.harness.references import reference

PACKAGE = "tests.strategy.behaviours"


def functions(module: str) -> dict[str, tuple[str, ...]]:
    """The parameters of a module's public functions, by name, without importing it."""
    path = pathlib.Path(__file__).parent / "behaviours" / f"{module}.py"
    tree = ast.parse(path.read_text())
    return {
        node.name: tuple(argument.arg for argument in node.args.args)
        for node in tree.body
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")
    }


def behaviours(module: str, *parameters: str) -> list[str]:
    """The functions of a module that take a strategy and these parameters."""
    taken = ("strategy", *parameters)
    return [f"{module}:{name}" for name, given in functions(module).items() if given == taken]


def check_same_as_alone(group: str, behaviour: str, *args: Any) -> None:
    """Runs a behaviour on a group and in one process, and compares all that it returns."""
    expected = reference(f"{PACKAGE}.{behaviour}", *args)
    results = GROUPS[group].run(f"{PACKAGE}.{behaviour}", *args)
    for rank, result in enumerate(results):
        assert_close(result, expected, f"rank {rank}")
        assert_equal(result.get("weights"), results[0].get("weights"), f"rank {rank}")


def assert_close(actual: Any, expected: Any, where: str, tolerance: float = 1e-5) -> None:
    if isinstance(expected, dict):
        assert set(actual) == set(expected), where
        for key in expected:
            assert_close(actual[key], expected[key], f"{where}: {key}", tolerance)
    elif isinstance(expected, (list, tuple)):
        assert len(actual) == len(expected), where
        if all(isinstance(value, float) for value in (*actual, *expected)):
            np.testing.assert_allclose(actual, expected, tolerance, tolerance, err_msg=where)
            return
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
