"""Runs the compiler: all units at once, as far as there are cores, then the two links."""

from __future__ import annotations

import os
import shlex
import subprocess
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from tfdist.native.compiler import Compiler
from tfdist.native.recipe import CORE, OPS, Recipe

_SECONDS = 900.0
_SHOWN_LINES = 6


class CompilationError(Exception):
    """The compiler failed.

    Attributes:
        shown: the lines of its output that matter.
        log: the command, and its whole output.
    """

    def __init__(self, shown: str, log: str) -> None:
        super().__init__(shown)
        self.shown = shown
        self.log = log


def compile_into(folder: Path, recipe: Recipe, compiler: Compiler) -> str:
    """Makes the core, and the ops if there are any.

    Args:
        folder: an empty folder, which will hold the libraries.
        recipe: what to make.
        compiler: what to make it with.

    Returns:
        The commands and the compiler's warnings.

    Raises:
        CompilationError: the compiler failed.
    """
    # The ops first: a file with TensorFlow's headers takes ten times as long as one without.
    units = [(path, recipe.compile_ops) for path in recipe.ops]
    units += [(path, recipe.compile_core) for path in recipe.core]
    objects = {path: f"{number}.o" for number, (path, _) in enumerate(units)}
    pool = ThreadPoolExecutor(max(1, min(len(units), len(os.sched_getaffinity(0)))))
    try:
        pending = []
        for path, flags in units:
            unit = ("-c", str(recipe.source / path), "-o", objects[path])
            pending.append(pool.submit(_run, (*compiler.command, *flags, *unit), folder))
        logs = [future.result() for future in as_completed(pending)]
    finally:
        # After a failure, or Ctrl-C, what has not begun need not begin.
        pool.shutdown(cancel_futures=True)
    links = [(CORE, recipe.core, recipe.link_core)]
    if recipe.ops:
        links.append((OPS, recipe.ops, recipe.link_ops))
    for library, paths, flags in links:
        own = (objects[path] for path in paths)
        logs.append(_run((*compiler.command, *own, "-o", library, *flags), folder))
    for name in objects.values():
        (folder / name).unlink()
    return "\n".join(logs)


def _run(command: tuple[str, ...], folder: Path) -> str:
    log = f"$ {shlex.join(command)}\n"
    try:
        done = subprocess.run(
            command,
            cwd=folder,
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
        ending = f"{command[0]} ended with code {done.returncode}"
        raise CompilationError(_shown(done.stdout) or ending, f"{log}{ending}\n")
    return log


def _shown(output: str) -> str:
    """A few lines from the first complaint on, which is the cause of the others, or the last."""
    lines = [line for line in output.splitlines() if line.strip()]
    end = max(0, len(lines) - _SHOWN_LINES)
    first = min(end, next((i for i, line in enumerate(lines) if "error:" in line), end))
    return "\n".join(lines[first:][:_SHOWN_LINES])
