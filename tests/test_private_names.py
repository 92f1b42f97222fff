"""Only `tfdist/_src/internals` reads private attributes of Keras's and TensorFlow's objects."""

from __future__ import annotations

import ast
import pathlib

PACKAGE = pathlib.Path(__file__).parent.parent / "tfdist" / "_src"

# Python's own.
PUBLIC = {"_current_frames", "_exit", "_getframe", "_replace"}


def test_private_attributes_are_read_in_one_place():
    trees = {
        path.relative_to(PACKAGE).as_posix(): ast.parse(path.read_text())
        for path in sorted(PACKAGE.rglob("*.py"))
    }
    inherited = set().union(*map(_defined, trees.values()))
    found = {
        name: _read(tree, _defined(tree), inherited)
        for name, tree in trees.items()
        # The launcher and the cluster have nothing to do with either.
        if not name.startswith(("internals/", "launch/", "cluster/"))
    }
    assert {name: names for name, names in found.items() if names} == {}


def _defined(tree: ast.Module) -> set[str]:
    """What the classes of a file have: methods, class attributes, what is set on `self`."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.add(node.target.id)
        elif isinstance(node, ast.Attribute) and _is_own(node) and isinstance(node.ctx, ast.Store):
            names.add(node.attr)
    return names


def _read(tree: ast.Module, own: set[str], inherited: set[str]) -> set[str]:
    """Private attributes that a file reads of others, or that `self` has from elsewhere."""
    return {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and node.attr.startswith("_")
        and not node.attr.startswith("__")
        and node.attr not in PUBLIC
        and not _is_super(node.value)
        and node.attr not in (inherited if _is_own(node) else own)
    }


def _is_own(node: ast.Attribute) -> bool:
    return isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")


def _is_super(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and ast.unparse(node.func) == "super"
