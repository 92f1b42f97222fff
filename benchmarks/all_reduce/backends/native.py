"""The backend `native`: tfdist's core, called through its C API and without TensorFlow."""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks.all_reduce.compiling import RANKS, build
from benchmarks.all_reduce.job import Job, MissingError, Process
from benchmarks.all_reduce.python import ENVIRONMENT


def native(job: Job) -> list[Process]:
    """Returns the processes to start: one for each rank."""
    core, headers = find_core()
    loop = build(
        "gcc", [RANKS / "native.c"], job.builds / "loop.so",
        "-fPIC", "-shared", f"-I{headers}", str(core), f"-Wl,-rpath,{core.parent}",
    )  # fmt: skip
    program = [sys.executable, "-m", "benchmarks.all_reduce.ranks.native", str(core), str(loop)]
    return job.each_rank(*program, str(int(job.in_place)), env=ENVIRONMENT)


def find_core() -> tuple[Path, Path]:
    """Returns the path of the core's library, and the folder of its headers.

    Compiles the library if necessary.

    Raises:
        MissingError: tfdist is not installed, or its core can be neither loaded nor compiled.
    """
    try:
        from tfdist._src import native as package
        from tfdist._src.native.compilation import SOURCE
        from tfdist.errors import NativeUnavailableError
    except ImportError as error:
        raise MissingError(f"{error}; pip install -e . where setup.cfg lies") from None
    try:
        return package.load().build.core, SOURCE
    except NativeUnavailableError as error:
        raise MissingError(" ".join(str(error).split())[:500]) from None
