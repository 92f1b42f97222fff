"""Measures the native collectives' kernels on a GPU, beside copies of as many bytes.

    python benchmarks/gpu.py --json=gpu.json

Takes NVIDIA's driver, a C++ compiler and NVRTC, and no TensorFlow. All ranks are streams of one
process and share its first GPU, so this says how fast kernels read and write memory and how long
they wait for each other, and nothing about links between GPUs. `GB/s` counts what is read and
written; `of a copy` compares that with a copy on the same GPU, in the same rounds.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from absl import app, flags

FLAGS = flags.FLAGS
flags.DEFINE_string("json", None, "a file to write the figures to")

_ROOT = Path(__file__).parents[1]
_COMPILE = ("c++", "-std=c++17", "-O2", "-pthread")
_UNITS = (
    "codec/avx2.cc",
    "codec/avx512.cc",
    "codec/baseline.cc",
    "codec/codec.cc",
    "device/awaiting.cc",
    "device/cuda.cc",
    "device/gpu.cc",
    "device/host_staged.cc",
    "device/kernel_all_reduce.cc",
    "device/kernel_codec.cc",
    "device/kernel_names.cc",
    "fingerprint.cc",
    "types.cc",
    "vector_unit.cc",
)


def main(_: list[str]) -> None:
    sys.path.insert(0, str(_ROOT))  # as it is, where tfdist is not installed
    from tfdist.errors import NativeUnavailableError
    from tfdist.native import gpu_kernels, nvidia, nvrtc
    from tfdist.native.recipe import SOURCE

    try:
        architecture, compiler = nvidia.architecture(), nvrtc.find()
    except NativeUnavailableError as error:
        sys.exit(str(error))
    with tempfile.TemporaryDirectory() as folder:
        program, kernels = Path(folder, "figures"), Path(folder, "kernels")
        units = [SOURCE / unit for unit in _UNITS]
        source = Path(__file__).parent / "gpus" / "figures.cc"
        subprocess.run(
            [*_COMPILE, f"-I{SOURCE}", source, *units, "-ldl", "-o", program], check=True
        )
        kernels.write_bytes(gpu_kernels.compile_for(architecture, compiler)[0])
        environment = {**os.environ, "GPU_KERNELS": str(kernels)}
        with subprocess.Popen(
            [program], env=environment, stdout=subprocess.PIPE, text=True
        ) as running:
            assert running.stdout
            about = json.loads(running.stdout.readline() or "{}")
            figures = list(_shown(about, f"{compiler} for {architecture}", running.stdout))
        if running.returncode:
            sys.exit(f"The program has ended with {running.returncode}.")
    if FLAGS.json:
        Path(FLAGS.json).write_text(json.dumps({**about, "figures": figures}, indent=1))


def _shown(about: dict[str, Any], kernels: str, lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    """Prints figures as they come."""
    print(f"{about.get('gpu')}, driver {about.get('driver')}, kernels by {kernels}")
    print(f"{'':34}{'bytes':>12}{'µs':>10}{'GB/s':>8}  of a copy")
    copy = 0.0
    for line in lines:
        figure = json.loads(line)
        speed = figure["bytes"] / figure["seconds"]
        copy = speed if figure["figure"] == "copy" else copy  # which comes first
        compared = "" if "streams" in figure["figure"] else f"{speed / copy:11.2f}"
        print(
            f"{figure['figure']:34}{figure['bytes']:12}{figure['seconds'] * 1e6:10.1f}"
            f"{speed / 1e9:8.0f}{compared}{'  FAILED' if 'failed' in figure else ''}",
            flush=True,
        )
        yield figure


if __name__ == "__main__":
    app.run(main)
