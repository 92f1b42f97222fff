"""One GPU, which all ranks share as streams of one process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from gpus import compiling
from tfdist.errors import NativeUnavailableError
from tfdist.native import nvidia

OWN = ("figures", "product")


def measure() -> dict[str, Any]:
    """Prints the figures as they come, and returns them."""
    try:
        architecture = nvidia.architecture()
    except NativeUnavailableError as error:
        sys.exit(str(error))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        program = compiling.build(folder, compiling.sources(OWN))
        files, made_by = compiling.kernels(folder, architecture)
        with subprocess.Popen(
            [program], env={**os.environ, **files}, stdout=subprocess.PIPE, text=True
        ) as running:
            assert running.stdout
            about = json.loads(running.stdout.readline() or "{}")
            figures = list(_shown(about, made_by, running.stdout))
        if running.returncode:
            sys.exit(f"The program has ended with {running.returncode}.")
    return {**about, "figures": figures}


def _shown(about: dict[str, Any], kernels: str, lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    print(f"{about.get('gpu')}, driver {about.get('driver')}, kernels by {kernels}")
    print(f"{'':34}{'bytes':>12}{'µs':>10}{'GB/s':>8}  of a copy")
    copy = 0.0
    for line in lines:
        figure = json.loads(line)
        if figure["figure"] == "copy":  # which comes first
            copy = figure["bytes"] / figure["seconds"]
        print(f"{figure['figure']:34}{_cells(figure, copy)}", flush=True)
        yield figure


def _cells(figure: dict[str, Any], copy: float) -> str:
    microseconds = figure["seconds"] * 1e6
    failed = "  FAILED" if "failed" in figure else ""
    if not figure["bytes"]:
        return f"{'':12}{microseconds:10.1f}{failed}"
    speed = figure["bytes"] / figure["seconds"]
    compared = "" if "streams" in figure["figure"] else f"{speed / (copy or speed):11.2f}"
    return f"{figure['bytes']:12}{microseconds:10.1f}{speed / 1e9:8.0f}{compared}{failed}"
