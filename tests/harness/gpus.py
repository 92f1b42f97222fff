"""Workers that train on simulated GPUs, on any machine.

The libraries that replace CUDA's driver and NCCL are those of the C++ tests; streams are threads. A
TensorFlow built without CUDA (tensorflow-cpu) gets a GPU with its own memory and stream from a
plugin. A TensorFlow built with CUDA has kernels for GPUs, which could not run on such a GPU. With
such a TensorFlow, strategies treat the CPU as a GPU, and the collectives' kernels for GPUs take
tensors of the CPU.
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
# With these settings, ranks can share a GPU since NCCL 2.30. Without the last two settings, ranks
# could deadlock, because each needs a part of the GPU that another rank occupies.
NCCL_SHARES = {
    "NCCL_MULTI_RANK_GPU_ENABLE": "1",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_MAX_CTAS": "2",
}
# The folders of the compiled libraries; the C++ tests share the first one.
_CACHE = _HERE.parents[1] / ".pytest_cache" / "d"
_FAKES, _FOLDER = _CACHE / "csrc-plain", _CACHE / "gpus"


def have_devices() -> bool:
    """Whether TensorFlow can place operations on simulated GPUs, because it is without CUDA."""
    import tensorflow as tf

    return not tf.sysconfig.get_build_info()["is_cuda_build"]


def variables(rank: int, transport: str, count: int = 1) -> dict[str, str]:
    """Returns the environment variables of a worker with simulated GPUs.

    Args:
        rank: the worker's rank.
        transport: how sums are computed; "" to decide by their size.
        count: the number of GPUs of each worker.
    """
    made = _libraries()
    return {
        "FAKE_CUDA": made["cuda"],  # The other libraries use its streams.
        "FAKE_CUDA_FIRST": str(rank * count),
        "FAKE_GPUS": str(count),  # The number of GPUs that TensorFlow sees.
        "TFDIST_CUDA_LIBRARY": made["cuda"],
        "TFDIST_NCCL_LIBRARY": made["nccl"],
        # Not by measured speeds, which mean nothing on simulated GPUs.
        "TFDIST_DEVICE_ALGORITHM": transport or "by_size",
        "TFDIST_XLA": "0" if have_devices() else "1",  # XLA cannot compile for simulated GPUs.
        "TESTS_GPU": made["tensorflow"],
    }


def real(visible: str, transport: str, shared: bool) -> dict[str, str]:
    """Returns the environment variables of a worker with real GPUs.

    Args:
        visible: the GPUs that it sees, as in CUDA_VISIBLE_DEVICES.
        transport: as for `variables`.
        shared: whether another worker uses the same GPUs.
    """
    return {
        **(NCCL_SHARES if shared and transport == "nccl" else {}),
        "TFDIST_DEVICE_ALGORITHM": transport or "by_size",
        "CUDA_VISIBLE_DEVICES": visible,
        "TF_FORCE_GPU_ALLOW_GROWTH": "true",  # Other workers may share the GPU.
        "TESTS_FLOAT32": "1",  # No TensorFloat-32: CPUs do not round to fewer bits.
    }


def stand_in() -> None:
    """Gives TensorFlow in this process a GPU, or makes strategies treat its CPU as one."""
    import tensorflow as tf

    from tfdist._src.comm import gpu
    from tfdist._src.keras.optimizers import repeated_slices
    from tfdist._src.native import gpu_kernels
    from tfdist._src.strategy import communication

    # The simulated driver has built-in kernels.
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
    """Returns the paths of the replaced libraries, and of the library that TensorFlow loads."""
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
