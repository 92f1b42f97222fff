"""Results of one process without a strategy, computed once and cached between test runs.

The cache's path depends on the tests' sources and on the versions of the packages that they use, so
that no outdated result is used. `pytest --cache-clear` deletes all results.
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
    """Caches references in a folder from now on.

    Args:
        folder: an existing folder.
        tidy: whether to remove references that have not been used for a week.
    """
    global _folder
    _folder = folder / _versions()
    for other in folder.iterdir() if tidy else ():
        if time.time() - other.stat().st_mtime > _WEEK:
            shutil.rmtree(other, ignore_errors=True)
    _folder.mkdir(exist_ok=True)
    os.utime(_folder)


def reference(function: str, *args: Any) -> Any:
    """Returns the result of `package.module:function(None, *args)` in one process.

    Args:
        function: the function, which must be deterministic.
        args: the arguments of the function. They must not be paths, because the contents of files
            may change.
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
    return pickle.loads(_known[name])  # A new object each time, since tests change it.


@functools.cache
def _versions() -> str:
    digest = hashlib.sha256(f"{platform.python_version()} {platform.machine()}".encode())
    digest.update(compilation.find_tensorflow().version.encode())
    for package in ("keras", "numpy"):
        digest.update(metadata.version(package).encode())
    for path in sorted(TESTS.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:24]
