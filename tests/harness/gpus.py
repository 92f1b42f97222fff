"""Workers that train on simulated GPUs, on any machine.

The C++ tests provide the libraries that replace CUDA's driver and NCCL. The streams of these
libraries are threads. If TensorFlow was built without CUDA (tensorflow-cpu), a plugin adds a GPU
with its own memory and stream. If TensorFlow was built with CUDA, its kernels for GPUs could not
run on such a GPU. In this case, strategies treat the CPU as a GPU, and the collectives' kernels for
GPUs take tensors of the CPU.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
from functools import cache
from pathlib import Path

from tests.cpp.compiling import VARIANTS, Toolchain
from tfdist._src import native
from tfdist._src.native import compilation, store
from tfdist._src.options import NativeOptions

_HERE = Path(__file__).parent
_OPS, _DEVICE = _HERE / "gpu_ops.cc", _HERE / "gpu_device.cc"
_SECONDS = 1500
# NCCL 2.30 or newer allows ranks to share a GPU with these settings. Without the last two settings,
# ranks could deadlock, because each needs a part of the GPU that another rank occupies.
NCCL_SHARES = {
    "NCCL_MULTI_RANK_GPU_ENABLE": "1",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_MAX_CTAS": "2",
}
# The folders of the compiled libraries; the C++ tests share the first one.
_CACHE = _HERE.parents[1] / ".pytest_cache" / "d"
_FAKES, _FOLDER = _CACHE / "csrc-plain", _CACHE / "gpus"


def have_devices() -> bool:
    """Whether this TensorFlow can use simulated GPUs, because it was built without CUDA."""
    import tensorflow as tf

    return not tf.sysconfig.get_build_info()["is_cuda_build"]


def variables(rank: int, transport: str, count: int = 1) -> dict[str, str]:
    """Returns the environment variables of a worker with simulated GPUs.

    Args:
        rank: the worker's rank.
        transport: the value of TFDIST_DEVICE_ALGORITHM; "" for by_size.
        count: the number of GPUs of each worker.
    """
    made = _libraries()
    return {
        "FAKE_CUDA": made["cuda"],  # The other libraries use the streams of this library.
        "FAKE_CUDA_FIRST": str(rank * count),
        "FAKE_GPUS": str(count),  # The number of GPUs that TensorFlow sees.
        "TFDIST_CUDA_LIBRARY": made["cuda"],
        "TFDIST_NCCL_LIBRARY": made["nccl"],
        # By default, the algorithm is not selected by a measurement, because the speed of simulated
        # GPUs means nothing.
        "TFDIST_DEVICE_ALGORITHM": transport or "by_size",
        "TFDIST_XLA": "0" if have_devices() else "1",  # XLA cannot compile for simulated GPUs.
        "TESTS_GPU": made["tensorflow"],
    }


def real(visible: str, transport: str, shared: bool) -> dict[str, str]:
    """Returns the environment variables of a worker with real GPUs.

    Args:
        visible: the GPUs that the worker sees, in the form of CUDA_VISIBLE_DEVICES.
        transport: as for `variables`.
        shared: whether another worker uses the same GPUs as this worker.
    """
    return {
        **(NCCL_SHARES if shared and transport == "nccl" else {}),
        "TFDIST_DEVICE_ALGORITHM": transport or "by_size",
        "CUDA_VISIBLE_DEVICES": visible,
        "TF_FORCE_GPU_ALLOW_GROWTH": "true",  # Other workers may share the GPU.
        "TESTS_FLOAT32": "1",  # TensorFloat-32 would round to fewer bits than CPUs do.
    }


def stand_in() -> None:
    """Adds a simulated GPU to TensorFlow, or makes strategies treat the CPU as a GPU."""
    import tensorflow as tf

    from tfdist._src.comm import gpu
    from tfdist._src.keras.optimizers import repeated_slices
    from tfdist._src.native import gpu_kernels
    from tfdist._src.strategy import communication

    # The simulated driver has built-in kernels, so no kernels are compiled.
    gpu_kernels.find = lambda architecture, options: os.devnull
    if have_devices():
        from tensorflow.python.framework import load_library

        load_library.load_pluggable_device_library(os.environ["TESTS_GPU"])
        return
    native.load_ops()
    tf.load_op_library(os.environ["TESTS_GPU"])
    gpu._numbers = lambda devices: list(range(len(devices)))
    communication.are_gpus = lambda devices: True
    repeated_slices.adds_in_any_order = lambda: True


def launches() -> int:
    """Returns the number of tfdist's kernels that the driver has run in this process."""
    return int(ctypes.CDLL(os.environ["TFDIST_CUDA_LIBRARY"]).fake_launches())


def copies() -> int:
    """Returns the number of copies that the driver has run in this process, except TensorFlow's."""
    return int(ctypes.CDLL(os.environ["TFDIST_CUDA_LIBRARY"]).fake_copies())


def nccl_calls(function: str) -> int:
    """Returns the number of calls of an NCCL function in this process."""
    library = ctypes.CDLL(os.environ["TFDIST_NCCL_LIBRARY"])
    return int(library.fake_nccl_calls(function.encode()))


@cache
def _libraries() -> dict[str, str]:
    """Compiles the simulated libraries and the library for TensorFlow, and returns their paths."""
    for folder in (_FAKES, _FOLDER):
        folder.mkdir(parents=True, exist_ok=True)
    with store.held(_FOLDER / "lock", _SECONDS, print):
        build = native.ensure(NativeOptions.from_environment())
        toolchain = Toolchain(VARIANTS["plain"], _FAKES, build.core)
        made = {name: str(path) for name, path in toolchain.fakes().items()}
        assert made, "The sources of the C++ tests are in a checkout, not in the wheel."
        found = compilation.read_recipe(compilation.find_tensorflow())
        flags = [*found.compile_ops, *found.tensorflow.link_flags]
        source = _DEVICE if have_devices() else _OPS
        if source is _OPS:
            flags += [str(build.ops), str(build.core), f"-Wl,-rpath,{build.folder}"]
        library = _FOLDER / f"{source.stem}-{found.key}-{source.stat().st_mtime_ns}.so"
        if not library.exists():
            _compile(toolchain.compiler, source, library, flags)
    return {**made, "tensorflow": str(library)}


def _compile(compiler: tuple[str, ...], source: Path, library: Path, flags: list[str]) -> None:
    unfinished = library.with_name(f"{os.getpid()}.so")
    done = subprocess.run(
        [*compiler, str(source), "-shared", "-o", str(unfinished), *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=_SECONDS,
    )
    assert done.returncode == 0, done.stdout
    for old in library.parent.glob(f"{source.stem}-*"):
        old.unlink()
    unfinished.rename(library)
