"""Names that only texts mention exist: in docstrings, and in programs held as strings."""

from __future__ import annotations

import ast
import builtins
import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = sorted((ROOT / "tfdist").rglob("*.py"))
PROGRAMS = sorted(
    path for folder in ("tests", "benchmarks") for path in (ROOT / folder).rglob("*.py")
)
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def _defined(trees: list[ast.Module]) -> set[str]:
    """All identifiers of some modules."""
    names = set(dir(builtins))
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Name):
            names.add(node.id)
        elif isinstance(node, ast.Attribute):
            names.add(node.attr)
        elif isinstance(node, ast.alias):
            names.update([*node.name.split("."), node.asname or ""])
    return names


def _mentioned(docstring: str) -> set[str]:
    """The errors of a docstring's Raises section, and the classes that its examples create."""
    names: set[str] = set()
    if section := re.search(r"\n\s*Raises:\n(.*?)(\n\n|\Z)", docstring, re.DOTALL):
        for errors in re.findall(r"^\s*((?:[\w.]+(?:, )?)+): ", section[1], re.MULTILINE):
            names.update(name.rpartition(".")[2] for name in errors.split(", "))
    for line in re.findall(r"(?:>>>|\.\.\.) (.*)", docstring):
        names.update(re.findall(r"(?<![\w.])([A-Z]\w*)\(", line))
    return {name for name in names if name[:1].isupper()}


def test_docstrings_name_errors_and_classes_that_exist():
    trees = {path: ast.parse(path.read_text()) for path in PACKAGE}
    known = _defined(list(trees.values()))
    stale = [
        (str(path.relative_to(ROOT)), name)
        for path, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, DOCUMENTED)
        for name in _mentioned(ast.get_docstring(node) or "")
        if name not in known
    ]
    assert not stale


def _imports(text: str) -> set[tuple[str, str]]:
    """Modules of tfdist and names that a text imports from them."""
    found = set()
    for module, names in re.findall(r"\bfrom (tfdist[\w.]*) import ([\w, ]+)", text):
        found.update((module, name.split(" as ")[0].strip()) for name in names.split(","))
    return found


def _exists(module: str, name: str) -> bool:
    try:
        return hasattr(importlib.import_module(module), name) or bool(
            importlib.util.find_spec(f"{module}.{name}")
        )
    except ModuleNotFoundError as error:
        return not (error.name or "").startswith("tfdist")  # An extra is not installed.
    except ImportError:
        return True


def test_programs_in_strings_import_names_that_exist():
    stale = [
        (str(path.relative_to(ROOT)), module, name)
        for path in PROGRAMS
        if path != Path(__file__)
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        for module, name in _imports(node.value)
        if not _exists(module, name)
    ]
    assert not stale


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("from tfdist._src import native; x", {("tfdist._src", "native")}),
        ("from tfdist.callbacks import A as b, C", {("tfdist.callbacks", c) for c in "AC"}),
        ("import tfdist", set()),
    ],
)
def test_imports_are_found_in_texts(text, found):
    assert _imports(text) == found


def test_names_are_found_in_docstrings():
    text = "Does it.\n\n    >>> Thing(1)\n\nRaises:\n    ClusterError, errors.TlsError: why.\n"
    assert _mentioned(text) == {"Thing", "ClusterError", "TlsError"}
