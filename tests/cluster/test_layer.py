"""The layer stands on the standard library, tfdist.errors and tfdist.options alone."""

import ast
import sys
from pathlib import Path

import pytest

import tfdist.cluster

FILES = sorted(Path(tfdist.cluster.__file__).parent.glob("*.py"))
BELOW = {"tfdist.errors", "tfdist.options", "tfdist._version"}


def imports(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            yield str(node.module)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_imports(path):
    for name in imports(path):
        standard = name.partition(".")[0] in sys.stdlib_module_names
        assert standard or name in BELOW or name.startswith("tfdist.cluster"), name


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_form(path):
    text = path.read_text()
    assert len(text.splitlines()) < 300
    assert (ast.get_docstring(ast.parse(text)) or "").split("\n")[0].endswith(".")


def test_exports():
    assert sorted(tfdist.cluster.__all__) == tfdist.cluster.__all__
    assert all(hasattr(tfdist.cluster, name) for name in tfdist.cluster.__all__)
