"""The rules that the layers keep."""

from __future__ import annotations

import ast
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parent.parent
PACKAGE = ROOT / "tfdist"
FILES = sorted(PACKAGE.rglob("*.py"))

# From the bottom to the top; a package imports only itself and what is below it.
LAYERS = [
    {"_version", "errors"},
    {"options"},
    {"cluster"},
    {"internals"},
    {"native"},
    {"collective"},
    {"compression"},
    {"strategies"},
    {"sharding"},
    {"trainer"},
    {"pipeline"},
    {"callbacks"},
    {"launch"},
    {"__init__", "__main__"},
]
WITHOUT_TENSORFLOW = {"_version", "errors", "options", "cluster", "launch"}
READS_ENVIRONMENT = {"options", "cluster", "launch"}


def _layer(path: pathlib.Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def _imports(path: pathlib.Path) -> list[str]:
    names = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return names


@pytest.mark.parametrize("path", FILES, ids=str)
def test_imports_go_down(path):
    height = {name: i for i, names in enumerate(LAYERS) for name in names}
    own = _layer(path)
    for name in _imports(path):
        parts = name.split(".")
        if parts[0] == "tfdist" and len(parts) > 1 and parts[1] in height and parts[1] != own:
            assert height[parts[1]] < height[own], f"{path} imports {name}, which is above it"


@pytest.mark.parametrize("path", FILES, ids=str)
def test_private_names_are_in_one_place(path):
    private = [n for n in _imports(path) if n.startswith(("tensorflow.python", "keras.src"))]
    assert _layer(path) == "internals" or not private, private


@pytest.mark.parametrize("path", [p for p in FILES if _layer(p) in WITHOUT_TENSORFLOW], ids=str)
def test_without_tensorflow(path):
    assert not [n for n in _imports(path) if n.split(".")[0] in ("tensorflow", "keras")]


@pytest.mark.parametrize("path", [p for p in FILES if _layer(p) not in READS_ENVIRONMENT], ids=str)
def test_only_the_lower_layers_read_the_environment(path):
    assert "os.environ" not in path.read_text()
    assert "getenv" not in path.read_text()


@pytest.mark.parametrize("path", FILES, ids=str)
def test_a_file_says_what_it_is(path):
    document = ast.get_docstring(ast.parse(path.read_text()))
    assert document, f"{path} has no docstring"


@pytest.mark.parametrize("path", FILES, ids=str)
def test_files_are_small(path):
    assert len(path.read_text().splitlines()) <= 300


def test_no_cycles():
    graph = {}
    for path in FILES:
        parts = [*path.relative_to(ROOT).with_suffix("").parts]
        graph[".".join(parts).removesuffix(".__init__")] = set(_top_level_imports(path))
    state: dict[str, str] = {}

    def visit(module: str, trail: tuple[str, ...]) -> None:
        assert state.get(module) != "open", " -> ".join((*trail, module))
        if module in state or module not in graph:
            return
        state[module] = "open"
        for name in graph[module] & set(graph):
            visit(name, (*trail, module))
        state[module] = "closed"

    for module in graph:
        visit(module, ())


def _top_level_imports(path: pathlib.Path) -> list[str]:
    names = []
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ImportFrom) and node.module:
            names += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
    own_package = ".".join(path.relative_to(ROOT).parent.parts)
    return [n for n in names if n != own_package]


def test_import_is_fast():
    code = "import sys, tfdist; sys.exit(any(m in sys.modules for m in ('tensorflow', 'keras')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_schedules_are_without_tensorflow():
    code = (
        "import sys, tfdist.pipeline, tfdist.pipeline.picture, tfdist.pipeline.schedules\n"
        "heavy = {'tensorflow', 'keras', 'numpy', 'matplotlib'} & set(sys.modules)\n"
        "sys.exit(bool(heavy))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_every_folder_is_a_package():
    # A folder without this file works in a checkout, but is not installed.
    for folder in {path.parent for path in FILES}:
        assert (folder / "__init__.py").exists(), folder
