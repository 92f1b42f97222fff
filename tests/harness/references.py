"""What one process without a strategy gives: computed once, and kept between runs of the tests.

The tests' sources and the versions of what they run on are part of the place, so that nothing is
kept longer than it holds. `pytest --cache-clear` forgets everything.
"""

from __future__ import annotations

import functools
import hashlib
import os
import pathlib
import pickle
import platform
import shutil
import time
from importlib import metadata
from typing import Any

from tests.harness.groups import GROUPS
from tfdist._src.native import compilation

_WEEK = 7 * 24 * 3600

TESTS = pathlib.Path(__file__).parents[1]

_folder: pathlib.Path | None = None
_known: dict[str, bytes] = {}


def keep_in(folder: pathlib.Path, *, tidy: bool) -> None:
    """Keeps references in a folder from now on.

    Args:
        folder: which exists.
        tidy: removes those that have not been used for a week.
    """
    global _folder
    _folder = folder / _versions()
    for other in folder.iterdir() if tidy else ():
        if time.time() - other.stat().st_mtime > _WEEK:
            shutil.rmtree(other, ignore_errors=True)
    _folder.mkdir(exist_ok=True)
    os.utime(_folder)


def reference(function: str, *args: Any) -> Any:
    """What `package.module:function(None, *args)` returns in one process.

    Args:
        function: does the same each time.
        args: no paths: what is in a file may change.
    """
    name = hashlib.sha256(repr((function, args)).encode()).hexdigest()[:24]
    if name not in _known:
        file = None if _folder is None else _folder / name
        if file is not None and file.exists():
            _known[name] = file.read_bytes()
        else:
            _known[name] = pickle.dumps(GROUPS["alone"].run(function, *args)[0])
            if file is not None:
                unfinished = file.with_name(f"{name}.{os.getpid()}")
                unfinished.write_bytes(_known[name])
                unfinished.rename(file)
    return pickle.loads(_known[name])  # A new one each time: tests take things out of it.


@functools.cache
def _versions() -> str:
    digest = hashlib.sha256(f"{platform.python_version()} {platform.machine()}".encode())
    digest.update(compilation.find_tensorflow().version.encode())
    for package in ("keras", "numpy"):
        digest.update(metadata.version(package).encode())
    for path in sorted(TESTS.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:24]
