"""Small sources that compile at once, and compilers that count their calls."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from tfdist._src import native
from tfdist._src.native import api, store
from tfdist._src.options import NativeOptions
from tfdist.errors import NativeUnavailableError

# Every function of the core; one of them tells what it was compiled from.
STUBS = "\n".join(f"int {name}(void) {{ return 7; }}" for name in api.FUNCTIONS)
CORE = f'#include "tiny.h"\nextern "C" {{\n{STUBS}\nint tiny(void) {{ return TINY; }}\n}}\n'


def write(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


@pytest.fixture(scope="session", autouse=True)
def _real_one_first() -> None:
    """Of several libraries of one name, those that need it take the one that was loaded first."""
    with contextlib.suppress(NativeUnavailableError):
        native.load()


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A core of two files."""
    return write(
        tmp_path / "csrc",
        {
            "tiny.h": "#define TINY 1\n",
            "core.cc": CORE,
            "inner/other.cc": '#include "tiny.h"\nint other() { return TINY; }\n',
        },
    )


@pytest.fixture
def options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> NativeOptions:
    """An empty cache, an empty package and an empty temporary folder."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    monkeypatch.setattr(store, "PACKAGE", tmp_path / "prebuilt")
    return NativeOptions(cache=tmp_path / "cache")


@pytest.fixture
def script(tmp_path: Path) -> Callable[..., str]:
    """Writes a compiler: a shell script around g++."""

    def make(body: str, name: str = "compiler") -> str:
        path = tmp_path / name
        path.write_text(f"#!/bin/sh\n{body}\n")
        path.chmod(0o755)
        return str(path)

    return make


@pytest.fixture
def installation(tmp_path: Path, source: Path) -> Path:
    """A folder with the package, and the small sources in it."""
    root = Path(api.__file__).parents[3]
    folder = tmp_path / "installation"
    unwanted = shutil.ignore_patterns("__pycache__", "csrc", "prebuilt")
    shutil.copytree(root / "tfdist", folder / "tfdist", ignore=unwanted)
    shutil.copytree(source, folder / "tfdist" / "csrc")
    for name in ("setup.cfg", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(root / name, folder)
    return folder


@pytest.fixture
def python(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs Python in a folder that holds a package."""

    def run(folder: Path, *arguments: str, **settings: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *arguments],
            cwd=folder,
            env={
                "PATH": os.environ["PATH"],
                "HOME": str(tmp_path / "home"),
                "PYTHONPATH": str(folder),
                "CUDA_VISIBLE_DEVICES": "",
                "TF_CPP_MIN_LOG_LEVEL": "3",
                **settings,
            },
            capture_output=True,
            text=True,
        )

    return run
