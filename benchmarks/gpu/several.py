"""Measures several GPUs of this host. Each GPU has a separate process."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu import compiling, published
from benchmarks.gpu.bandwidth import algorithm_bandwidth, bus_bandwidth
from tfdist._src.native import nvidia
from tfdist._src.options import Options
from tfdist.errors import NativeUnavailableError

_OWN = ("several", "all_reduces", "copies", "nccl", "product", "products", "rank")


def measure(ranks: int, rounds: int, sizes: Sequence[int]) -> dict[str, Any]:
    """Measures several GPUs, and prints each figure when it is known.

    Args:
        ranks: the number of GPUs.
        rounds: the number of rounds.
        sizes: the numbers of bytes to reduce.

    Returns:
        All figures, and a description of the GPUs.
    """
    options = Options.from_environment(dict(os.environ))
    devices, about = _found(ranks, options)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        sources = [*compiling.sources(_OWN), compiling.TESTS / "cpp/ranks.cc"]
        program = compiling.build(folder, sources)
        files, about["kernels"] = compiling.kernels(folder, devices[0].architecture)
        environment = {**os.environ, **files, "NCCL_LIBRARY": about["nccl_library"]}
        print(f"{ranks} GPUs, {devices[0].name}, driver for CUDA {about['driver']}, ", end="")
        print(f"NCCL {about['nccl'] or 'none'}, kernels by {about['kernels']}, {rounds} rounds")
        words = [str(program), str(ranks), str(rounds), *map(str, sorted(sizes))]
        with subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, text=True) as running:
            assert running.stdout
            lines = list(_shown(ranks, running.stdout))
        if running.returncode:
            sys.exit(f"The program has ended with {running.returncode}.")
    published.show()
    missing = [line for line in lines if "missing" in line]
    figures = [line for line in lines if "figure" in line]
    return {**about, "figures": figures, "missing": missing, "published": published.PUBLISHED}


def _found(ranks: int, options: Options) -> tuple[list[nvidia.Device], dict[str, Any]]:
    """Returns the GPUs to measure, and a description of them.

    Ends the program if there are fewer GPUs than ranks, or if the GPUs have different
    architectures.
    """
    try:
        driver = nvidia.Driver(options.cuda_library)
        devices = driver.devices()
    except NativeUnavailableError as error:
        sys.exit(str(error))
    if len(devices) < ranks:
        sys.exit(
            f"--gpus={ranks} needs as many GPUs. Received: a host with {len(devices)} visible. "
            "Lower it, or correct CUDA_VISIBLE_DEVICES."
        )
    devices = devices[:ranks]
    if len({device.architecture for device in devices}) > 1:
        sys.exit(f"The GPUs are of several kinds: choose some by CUDA_VISIBLE_DEVICES. {devices}")
    library = options.nccl_library or nvidia.nccl()
    try:
        version = nvidia.nccl_version(library)
    except NativeUnavailableError:
        library = version = ""
    about = {"gpus": [device.name for device in devices], "driver": driver.version}
    return devices, {**about, "nccl": version, "nccl_library": library}


def _shown(ranks: int, lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    print(f"{'':44}{'bytes':>12}{'µs':>12}{'GB/s':>8}{'of the bus':>12}")
    alone = 0.0
    for line in lines:
        found = json.loads(line)
        if "missing" in found:
            print(f"{found['missing']}: missing: {found['why']}", flush=True)
            yield found
            continue
        found["rounds"] = found["seconds"]
        found["seconds"] = statistics.median(found["rounds"])
        if found["figure"] == "product":
            alone = found["seconds"] if found["beside"] == "nothing" else alone
        else:
            _add_bandwidths(found, ranks)
        print(f"{_name(found):44}{_cells(found, alone)}", flush=True)
        yield found


def _add_bandwidths(figure: dict[str, Any], ranks: int) -> None:
    size, seconds = figure["bytes"], figure["seconds"]
    moved = 2 * size if figure["figure"] == "copies both ways" else size
    figure["algorithm_bandwidth"] = algorithm_bandwidth(moved, seconds)
    if "reader" not in figure:
        figure["bus_bandwidth"] = bus_bandwidth(figure["figure"], size, seconds, ranks)


def _name(figure: dict[str, Any]) -> str:
    if "reader" in figure:
        link = "↔" if figure["figure"] == "copies both ways" else "←"
        return f"{figure['figure']}, GPU {figure['reader']} {link} {figure['owner']}"
    if "beside" in figure:
        return f"product beside {figure['beside']}"
    return f"{figure['figure']}, {figure['way']}" if "way" in figure else str(figure["figure"])


def _cells(figure: dict[str, Any], alone: float) -> str:
    cells = f"{figure['bytes']:12}{figure['seconds'] * 1e6:12.1f}"
    if figure["figure"] == "product":
        return f"{cells}   {figure['seconds'] / alone:.2f} of its time alone"
    cells += f"{figure['algorithm_bandwidth'] / 1e9:8.2f}"
    return cells + (f"{figure['bus_bandwidth'] / 1e9:12.2f}" if "bus_bandwidth" in figure else "")
