"""The surface of modules that need an extra, as their files state it, without importing them."""

from __future__ import annotations

import ast
import importlib
import pathlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from tests.test_architecture import PACKAGE, ROOT

Bases = Callable[..., Iterable[tuple[type, str]]]


def lines(module: str, bases_of: Bases) -> Iterator[str]:
    """The lines of a module in `tfdist/`, which passes on the names of others.

    Args:
        module: its name.
        bases_of: the public classes among some and their bases, and what they are called.
    """
    origins = _imports(ast.parse((PACKAGE / f"{module}.py").read_text()))
    for name in sorted(_all(PACKAGE / f"{module}.py")):
        tree = ast.parse(_file(origins[name]).read_text())
        node = next(n for n in tree.body if getattr(n, "name", "") == name)
        shown = f"tfdist.{module}.{name}"
        if isinstance(node, ast.ClassDef):
            yield from _class(shown, node, _imports(tree), bases_of)
        else:
            yield f"{shown}{_signature(node)}"


def _class(
    name: str, node: ast.ClassDef, origins: dict[str, str], bases_of: Bases
) -> Iterator[str]:
    ours, others = [], []
    for base in map(ast.unparse, node.bases):
        origin = origins.get(base, base)
        if origin.startswith("tfdist."):
            ours.append(getattr(importlib.import_module(origin), base))
        else:
            others.append((object, f"{origin.partition('.')[0]}.{base.split('.')[-1]}"))
    bases = [*bases_of(*ours), *others]
    methods = {n.name: n for n in node.body if isinstance(n, ast.FunctionDef)}
    made = _signature(methods["__init__"], bound=True) if "__init__" in methods else _fields(node)
    derived = f" derives from {', '.join(shown for _, shown in bases)}" if bases else ""
    yield f"class {name}{made}{derived}"
    for member, method in sorted(methods.items()):
        if member.startswith("_") or any(hasattr(base, member) for base, _ in bases):
            continue
        decorators = [ast.unparse(one) for one in method.decorator_list]
        is_property = "property" in decorators
        yield f"{name}.{member}{' (property)' if is_property else _signature(method)}"


def _signature(function: Any, *, bound: bool = False) -> str:
    given: ast.arguments = function.args
    several = [one for one in (given.vararg, given.kwarg) if one is not None]
    for argument in (*given.posonlyargs, *given.args, *given.kwonlyargs, *several):
        argument.annotation = None
    if bound:
        del given.args[0]
    return f"({ast.unparse(given)})"


def _fields(node: ast.ClassDef) -> str:
    shown = []
    for field in (n for n in node.body if isinstance(n, ast.AnnAssign)):
        value = field.value
        if isinstance(value, ast.Call):  # field(default=...)
            value = next((k.value for k in value.keywords if k.arg == "default"), None)
        default = "" if value is None else f"={ast.unparse(value)}"
        shown.append(f"{ast.unparse(field.target)}{default}")
    return f"({', '.join(shown)})"


def _imports(tree: ast.Module) -> dict[str, str]:
    """The module of each name that a file imports from one, anywhere."""
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    return {alias.name: node.module or "" for node in nodes for alias in node.names}


def _all(path: pathlib.Path) -> list[str]:
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return list(ast.literal_eval(node.value))
    raise AssertionError(f"{path} has no __all__")


def _file(module: str) -> pathlib.Path:
    return ROOT / f"{module.replace('.', '/')}.py"
