"""The layer depends only on the standard library and on what lies below it."""

import ast
import sys
from pathlib import Path

import tfdist._src.cluster

FILES = sorted(Path(tfdist._src.cluster.__file__).parent.rglob("*.py"))
BELOW = {
    "tfdist.errors",
    "tfdist._src.log",
    "tfdist._src.options",
    "tfdist._src.progress_file",
    "tfdist._version",
}


def imports(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            yield str(node.module)


def is_allowed(name):
    standard = name.partition(".")[0] in sys.stdlib_module_names
    return standard or name in BELOW or name.startswith("tfdist._src.cluster")


def test_the_layer_imports_only_what_is_below_it():
    assert not [(str(path), n) for path in FILES for n in imports(path) if not is_allowed(n)]


def test_first_lines_are_sentences():
    first = {path: (ast.get_docstring(ast.parse(path.read_text())) or "") for path in FILES}
    assert not [str(path) for path, text in first.items() if not text.split("\n")[0].endswith(".")]


def test_exported_names_are_sorted_and_exist():
    assert sorted(tfdist._src.cluster.__all__) == tfdist._src.cluster.__all__
    assert all(hasattr(tfdist._src.cluster, name) for name in tfdist._src.cluster.__all__)
