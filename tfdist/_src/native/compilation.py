"""Compiles the sources in parallel, those of the ops in one go, then links the two libraries."""

from __future__ import annotations

import os
import shlex
import subprocess
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from tfdist._src.native.compiler import Compiler
from tfdist._src.native.recipe import CORE, OPS, Recipe
from tfdist._src.options import environment_of_programs

_SECONDS = 900.0
_SHOWN_LINES = 6


class CompilationError(Exception):
    """The compiler failed.

    Attributes:
        shown: the relevant lines of its output.
        log: the command and its full output.
    """

    def __init__(self, shown: str, log: str) -> None:
        super().__init__(shown)
        self.shown = shown
        self.log = log


def compile_into(folder: Path, recipe: Recipe, compiler: Compiler) -> str:
    """Builds the core, and the ops if there are any.

    Args:
        folder: an empty directory for the libraries.
        recipe: what to build.
        compiler: the compiler to use.

    Returns:
        The commands and the compiler's warnings.

    Raises:
        CompilationError: the compiler failed.
    """
    units = [(recipe.source / path, recipe.compile_core) for path in recipe.core]
    core = [path for path, _ in units]
    ops = folder / "ops.cc"
    if recipe.ops:
        # One unit, and the first: TensorFlow's headers take longer to compile than what uses them.
        ops.write_text("".join(f'#include "{path}"\n' for path in recipe.ops))
        units.insert(0, (ops, recipe.compile_ops))
    objects = {path: f"{number}.o" for number, (path, _) in enumerate(units)}
    pool = ThreadPoolExecutor(max(1, min(len(units), len(os.sched_getaffinity(0)))))
    try:
        pending = []
        for path, flags in units:
            unit = ("-c", str(path), "-o", objects[path])
            pending.append(pool.submit(_run, (*compiler.command, *flags, *unit), folder))
        logs = [future.result() for future in as_completed(pending)]
    finally:
        # After a failure or Ctrl-C, do not start the remaining units.
        pool.shutdown(cancel_futures=True)
    links = [(CORE, core, recipe.link_core)]
    if recipe.ops:
        links.append((OPS, [ops], recipe.link_ops))
    for library, paths, flags in links:
        inputs = (objects[path] for path in paths)
        logs.append(_run((*compiler.command, *inputs, "-o", library, *flags), folder))
    for name in objects.values():
        (folder / name).unlink()
    ops.unlink(missing_ok=True)
    return "\n".join(logs)


def _run(command: tuple[str, ...], folder: Path) -> str:
    log = f"$ {shlex.join(command)}\n"
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            env=environment_of_programs(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=_SECONDS,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CompilationError(str(error), f"{log}{error}\n") from error
    log += done.stdout
    if done.returncode != 0:
        failure = f"{command[0]} exited with code {done.returncode}"
        raise CompilationError(_shown(done.stdout) or failure, f"{log}{failure}\n")
    return log


def _shown(output: str) -> str:
    """A few lines from the first error on, which causes the others; without one, the last lines."""
    lines = [line for line in output.splitlines() if line.strip()]
    end = max(0, len(lines) - _SHOWN_LINES)
    first = min(end, next((i for i, line in enumerate(lines) if "error:" in line), end))
    return "\n".join(lines[first:][:_SHOWN_LINES])
