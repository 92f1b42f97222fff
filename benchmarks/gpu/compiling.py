"""Compiles the C++ programs of this benchmark, and the GPU kernels that they launch."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tfdist._src.native import compilation, gpu_kernels
from tfdist._src.native.compilation import TensorFlowPackage
from tfdist.errors import NativeUnavailableError

HERE = Path(__file__).parent
# The programs use helper functions of the C++ tests, which are in this folder.
TESTS = HERE.parents[1] / "tests"
# These are the options with which the core is compiled; see tfdist/_src/native/compilation.py.
_COMPILE = ("c++", "-std=c++17", "-O2", "-pthread", "-ffp-contract=off")
_PRODUCT = HERE / "product.cu"


def sources(own: Sequence[str]) -> list[Path]:
    """Returns the source files of a program.

    Args:
        own: the names of source files in this folder, without the extension. The source files of
            the core follow them.
    """
    core = compilation.read_recipe(TensorFlowPackage(Path(), "")).core
    return [*(HERE / f"{unit}.cc" for unit in own), *(compilation.SOURCE / unit for unit in core)]


def build(folder: Path, sources: Sequence[Path]) -> Path:
    """Compiles a program. Compiles as many source files at the same time as there are cores.

    Args:
        folder: the folder for the output.
        sources: the source files. The program gets the name of the first file.

    Returns:
        The path of the program.
    """
    program = folder / sources[0].stem
    objects = [folder / f"{number}.o" for number, _ in enumerate(sources)]

    def compile_one(source: Path, made: Path) -> None:
        command = [*_COMPILE, f"-I{compilation.SOURCE}", f"-I{HERE}"]
        command += [f"-I{TESTS}", "-c", source, "-o", made]
        subprocess.run(command, check=True)

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        list(pool.map(compile_one, sources, objects))
    subprocess.run([*_COMPILE, *objects, "-ldl", "-o", program], check=True)
    return program


def kernels(folder: Path, architecture: str) -> tuple[dict[str, str], str]:
    """Compiles tfdist's kernels and the kernel of `product.cu`.

    Args:
        folder: the folder for the output.
        architecture: the GPU's architecture, such as "sm_90".

    Returns:
        Environment variables with the paths of the compiled kernels, which the programs read; and a
        description of the compiler.
    """
    try:
        compiler = gpu_kernels.find_nvrtc()
    except NativeUnavailableError as error:
        sys.exit(str(error))
    flags = [f"--gpu-architecture={architecture}"]
    product = compiler.compile(_PRODUCT.name, _PRODUCT.read_text(), {}, flags)[0]
    made = {
        "GPU_KERNELS": gpu_kernels.compile_for(architecture, compiler)[0],
        "PRODUCT_KERNEL": product,
    }
    for name, binary in made.items():
        (folder / name).write_bytes(binary)
    return {name: str(folder / name) for name in made}, f"{compiler} for {architecture}"
