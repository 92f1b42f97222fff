"""Prints the public surface; its lines are kept in surface.txt.

python -m tests.surface > tests/surface/surface.txt

A class names the classes that it derives from, and does not repeat their members. Fields of a
dataclass are in its signature. The lines are the same for all versions of Python.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
import importlib
import inspect
import io
import re
import types
from collections.abc import Iterator
from typing import Any

import tfdist
from tests.surface import parsed
from tfdist._src.launch import COMMANDS
from tfdist._src.options import Variable

MODULES = (
    "",
    "callbacks",
    "collective",
    "compression",
    "elastic",
    "errors",
    "global_batch",
    "monitoring",
    "pipeline",
)
# These need extras, which may not be installed.
ENGINES = ("ray", "spark")


def lines() -> Iterator[str]:
    """The surface, a line for each name."""
    for name, value in _names():
        yield from _described(name, value)
    for engine in ENGINES:
        yield from parsed.lines(engine, bases_of)
    for command in COMMANDS:
        yield f"$ tfdist {command} {' '.join(_flags(command))}".rstrip()
    yield from sorted(settings())


def settings() -> set[str]:
    """The variables that a user may set."""
    return {name for key, name in vars(Variable).items() if key.isupper()}


class Declared:
    """An attribute that a class declares, and its objects have."""

    def __init__(self, kind: type, name: str) -> None:
        self.type = inspect.get_annotations(kind).get(name)


def _names() -> Iterator[tuple[str, Any]]:
    for name in MODULES:
        module = getattr(tfdist, name) if name else tfdist
        for member in sorted(_public(module)):
            yield ".".join(filter(None, ("tfdist", name, member))), getattr(module, member)


@functools.cache
def _public_classes() -> dict[type, str]:
    return {value: name for name, value in _names() if inspect.isclass(value)}


def _public(module: types.ModuleType) -> list[str]:
    if hasattr(module, "__all__"):
        return list(module.__all__)
    own = (n for n, v in vars(module).items() if getattr(v, "__module__", "") == module.__name__)
    return [name for name in own if not name.startswith("_")]


def _described(name: str, value: Any) -> Iterator[str]:
    if isinstance(value, types.ModuleType):
        yield f"{name} (module)"
    elif isinstance(value, types.UnionType):
        yield f"{name} (type)"
    elif inspect.isclass(value):
        yield from _class(name, value)
    elif isinstance(value, (staticmethod, classmethod)):
        yield from _described(name, value.__func__)
    elif inspect.isdatadescriptor(value) or hasattr(type(value), "__set_name__"):
        yield f"{name} (property)"
    elif callable(value):
        yield f"{name}{_signature(value)}"
    elif isinstance(value, dict):
        yield f"{name}: {', '.join(map(str, value))}"
    else:
        yield f"{name}: {value.type if isinstance(value, Declared) else type(value).__name__}"


def _class(name: str, kind: type) -> Iterator[str]:
    bases = list(bases_of(*kind.__mro__[1:]))
    members = {
        member: inspect.getattr_static(kind, member, Declared(base, member))
        for base in kind.__mro__
        if _is_ours(base)
        for member in (*vars(base), *inspect.get_annotations(base))
        if not member.startswith("_") and not any(hasattr(other, member) for other, _ in bases)
    }
    if issubclass(kind, enum.Enum):
        constants = [constant.name for constant in kind]
        yield f"class {name}: {', '.join(constants)}"
        members = {key: value for key, value in members.items() if key not in constants}
    else:
        derived = f" derives from {', '.join(shown for _, shown in bases)}" if bases else ""
        yield f"class {name}{_constructor(kind)}{derived}"
    if dataclasses.is_dataclass(kind):
        for field in dataclasses.fields(kind):
            members.pop(field.name, None)
    for member in sorted(members):
        yield from _described(f"{name}.{member}", members[member])


def bases_of(*kinds: type) -> Iterator[tuple[type, str]]:
    """The public classes among some and their bases, and what they are called.

    A class that another one of them derives from is left out.
    """
    found: list[type] = []
    for kind in (one for given in kinds for one in given.__mro__):
        if any(issubclass(other, kind) for other in found) or kind.__module__ in ("abc", "enum"):
            continue
        name = _public_classes().get(kind)
        if kind is not object and (name or not _is_ours(kind)):
            found.append(kind)
            root = kind.__module__.partition(".")[0]
            outside = kind.__name__ if root == "builtins" else f"{root}.{kind.__name__}"
            yield kind, name or outside


def _is_ours(kind: type) -> bool:
    return kind.__module__.startswith("tfdist")


def _constructor(kind: type) -> str:
    # What Python says of an exception without a constructor of its own differs between versions.
    bare = not any("__init__" in vars(base) for base in kind.__mro__ if _is_ours(base))
    return "" if bare and issubclass(kind, BaseException) else _signature(kind)


def _signature(value: Any) -> str:
    signature = inspect.signature(value)
    without = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
    return str(signature.replace(parameters=without, return_annotation=signature.empty))


def _flags(command: str) -> list[str]:
    """The options of a command: all their names, and the values that they take, if few."""
    module = importlib.import_module(COMMANDS[command][0])
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        module.main(["--help"])
    found = set()
    for text in re.findall(r"^  (-.*?)(?:  |$)", printed.getvalue(), re.MULTILINE):
        names = re.findall(r"(?<![\w-])--?[a-z][a-z-]*", text)
        values = re.findall(r"\{.*?\}", text)[:1]
        found.add("=".join(["/".join(sorted(names)), *values]))
    return sorted(found - {"--help/-h"})


if __name__ == "__main__":
    print("\n".join(lines()))
