"""Measures one GPU. All ranks are streams of one process, and share the GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

from benchmarks.gpu import compiling, onebit
from benchmarks.gpu.parts import ONE_BIT, PARTS
from tfdist._src.native import nvidia
from tfdist._src.options import Options
from tfdist.errors import NativeUnavailableError

OWN = ("figures", "comparing", "messages", "product")


def measure(rounds: int, size: int, parts: Collection[str] = PARTS) -> dict[str, Any]:
    """Measures one GPU, and prints each figure when it is known.

    Args:
        rounds: the number of rounds.
        size: the size of a large tensor in bytes.
        parts: the parts to measure, keys of `PARTS`.

    Returns:
        All figures, and a description of the GPU.
    """
    options = Options.from_environment(dict(os.environ))
    try:
        devices = nvidia.Driver(options.cuda_library).devices()
    except NativeUnavailableError as error:
        sys.exit(str(error))
    if not devices:
        sys.exit("no GPU: CUDA_VISIBLE_DEVICES shows none")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        sources = [*compiling.sources(OWN), compiling.TESTS / "cpp/ranks.cc"]
        program = compiling.build(folder, sources)
        files, made_by = compiling.kernels(folder, devices[0].architecture)
        words = [str(program), str(rounds), str(size), *(part for part in parts if part != ONE_BIT)]
        beside = onebit.measure(rounds, size) if ONE_BIT in parts else ()
        with subprocess.Popen(
            words, env={**os.environ, **files}, stdout=subprocess.PIPE, text=True
        ) as running:
            assert running.stdout
            about = json.loads(running.stdout.readline() or "{}")
            print(
                f"{about.get('gpu')}, driver {about.get('driver')}, kernels by {made_by}, ", end=""
            )
            print(f"{rounds} rounds")
            figures = chain(map(json.loads, running.stdout), beside)
            lines = list(shown(figures))
        if running.returncode:
            sys.exit(f"The program has ended with {running.returncode}.")
    missing = [line for line in lines if "missing" in line]
    figures = [line for line in lines if "figure" in line]
    return {**about, "rounds": rounds, "figures": figures, "missing": missing}


def shown(lines: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Prints a line of the table for each figure, and yields the figures.

    If a figure is compared with another figure, adds the ratio to it.

    Args:
        lines: the figures, and the parts that cannot be measured. A figure must follow the figure
            with which it is compared.
    """
    print(f"{'':38}{'bytes':>12}{'µs':>10}{'GB/s':>8}  ratio")
    known: dict[str, dict[str, Any]] = {}
    for line in lines:
        if "missing" in line:
            print(f"{line['missing']}: missing: {line['why']}", flush=True)
            yield line
            continue
        known[line["figure"]] = line
        beside = known.get(line["beside"])
        if beside and beside is not line:
            line["ratio"] = _speed(line) / _speed(beside)
        print(f"{line['figure']:38}{_cells(line)}", flush=True)
        yield line


def _speed(figure: dict[str, Any]) -> float:
    return float((figure["bytes"] or 1) / figure["seconds"])


def _cells(figure: dict[str, Any]) -> str:
    speed = f"{_speed(figure) / 1e9:8.0f}" if figure["bytes"] else f"{'':8}"
    compared = f"{figure['ratio']:7.2f} of {figure['beside']}" if "ratio" in figure else ""
    failed = "  FAILED" if "failed" in figure else ""
    return f"{figure['bytes'] or '':12}{figure['seconds'] * 1e6:10.1f}{speed}{compared}{failed}"
