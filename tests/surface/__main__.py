"""Prints the public surface; its lines are kept in surface.txt.

python -m tests.surface > tests/surface/surface.txt
"""

from __future__ import annotations

import contextlib
import enum
import importlib
import inspect
import io
import re
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from tfdist._src.launch import COMMANDS
from tfdist._src.options import Variable

MODULES = (
    "",
    ".callbacks",
    ".collective",
    ".compression",
    ".errors",
    ".global_batch",
    ".monitoring",
    ".pipeline",
)


def lines() -> Iterator[str]:
    """The surface, a line for each name."""
    import tfdist

    for suffix in MODULES:
        module = getattr(tfdist, suffix[1:]) if suffix else tfdist
        for name in sorted(_public(module)):
            yield from _described(f"tfdist{suffix}.{name}", getattr(module, name))
    for command in COMMANDS:
        yield f"$ tfdist {command} {' '.join(_flags(command))}".rstrip()
    yield from sorted(name for key, name in vars(Variable).items() if key.isupper())


def _public(module: ModuleType) -> list[str]:
    if hasattr(module, "__all__"):
        return list(module.__all__)
    own = (n for n, v in vars(module).items() if getattr(v, "__module__", "") == module.__name__)
    return [name for name in own if not name.startswith("_")]


def _described(name: str, value: Any) -> Iterator[str]:
    if isinstance(value, ModuleType):
        yield f"{name} (module)"
    elif inspect.isclass(value):
        # The constructor of enumerations differs between versions of Python.
        is_enum = issubclass(value, enum.Enum)
        yield f"class {name}{' (enumeration)' if is_enum else _signature(value)}"
        for member in sorted(_members(value)):
            yield from _described(f"{name}.{member}", inspect.getattr_static(value, member))
    elif isinstance(value, (staticmethod, classmethod)):
        yield from _described(name, value.__func__)
    elif isinstance(value, property):
        yield f"{name} (property)"
    elif callable(value):
        yield f"{name}{_signature(value)}"
    else:
        yield f"{name}: {type(value).__name__}"


def _signature(value: Any) -> str:
    try:
        signature = inspect.signature(value)
    except ValueError:
        return "(...)"
    without = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
    return str(signature.replace(parameters=without, return_annotation=signature.empty))


def _members(kind: type) -> set[str]:
    """Public members that are defined in tfdist, not inherited from elsewhere."""
    ours = [base for base in kind.__mro__ if base.__module__.startswith("tfdist")]
    return {name for base in ours for name in vars(base) if not name.startswith("_")}


def _flags(command: str) -> list[str]:
    module = importlib.import_module(COMMANDS[command][0])
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        module.main(["--help"])
    text = printed.getvalue().partition("\nexamples:")[0]
    return sorted(set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", text)))


if __name__ == "__main__":
    print("\n".join(lines()))
