"""Workers that train on GPUs which a driver of threads stands for, on any machine.

The libraries that stand for CUDA's driver and NCCL are those of the C++ tests. A TensorFlow built
without CUDA (tensorflow-cpu) gets a GPU with a memory and a stream of its own, by a plugin. In one
with CUDA there are kernels for GPUs, which could not run on that: its CPU is taken for a GPU, and
the kernel that sums tensors of GPUs takes those of CPUs.
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
# With these settings ranks can share a GPU since NCCL 2.30. Without the last two they could wait
# for each other for room on it.
NCCL_SHARES = {
    "NCCL_MULTI_RANK_GPU_ENABLE": "1",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_MAX_CTAS": "2",
}
# Keep the libraries; the first those of the C++ tests, too.
_CACHE = _HERE.parents[1] / ".pytest_cache" / "d"
_FAKES, _FOLDER = _CACHE / "csrc-plain", _CACHE / "gpus"


def have_devices() -> bool:
    """Whether TensorFlow places operations on GPUs here."""
    import tensorflow as tf

    return not tf.sysconfig.get_build_info()["is_cuda_build"]


def variables(rank: int, transport: str, count: int = 1) -> dict[str, str]:
    """The environment of a worker.

    Args:
        rank: its own.
        transport: how sums are to be computed; "" for whichever is best.
        count: how many GPUs each worker has.
    """
    made = _libraries()
    return {
        "FAKE_CUDA": made["cuda"],  # in whose streams the others work
        "FAKE_CUDA_FIRST": str(rank * count),
        "FAKE_GPUS": str(count),  # for TensorFlow
        "TFDIST_CUDA_LIBRARY": made["cuda"],
        "TFDIST_NCCL_LIBRARY": made["nccl"],
        # What is faster here says nothing.
        "TFDIST_DEVICE_ALGORITHM": transport or "by_size",
        "TFDIST_XLA": "0" if have_devices() else "1",  # it has no compiler for these
        "TESTS_GPU": made["tensorflow"],
    }


def real(visible: str, transport: str, shared: bool) -> dict[str, str]:
    """The environment of a worker with real GPUs.

    Args:
        visible: which it sees, as CUDA_VISIBLE_DEVICES says it.
        transport: as for `variables`.
        shared: whether another worker has the same ones.
    """
    return {
        **(NCCL_SHARES if shared and transport == "nccl" else {}),
        "TFDIST_DEVICE_ALGORITHM": transport or "by_size",
        "CUDA_VISIBLE_DEVICES": visible,
        "TF_FORCE_GPU_ALLOW_GROWTH": "true",  # Others may have the same one.
        "TESTS_FLOAT32": "1",  # CPUs do not round to fewer bits.
    }


def stand_in() -> None:
    """Gives TensorFlow in this process a GPU, or has the strategies take its CPU for one."""
    import tensorflow as tf

    from tfdist._src.comm import gpu
    from tfdist._src.keras.optimizers import repeated_slices
    from tfdist._src.native import gpu_kernels
    from tfdist._src.strategy import communication

    # The driver of threads has its kernels built in.
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
    """How many kernels of tfdist the driver has run in this process."""
    return int(ctypes.CDLL(os.environ["TFDIST_CUDA_LIBRARY"]).fake_launches())


def copies() -> int:
    """How many copies the driver has run in this process, without those that TensorFlow makes."""
    return int(ctypes.CDLL(os.environ["TFDIST_CUDA_LIBRARY"]).fake_copies())


def nccl_calls(function: str) -> int:
    """How often a function of NCCL was called in this process."""
    library = ctypes.CDLL(os.environ["TFDIST_NCCL_LIBRARY"])
    return int(library.fake_nccl_calls(function.encode()))


@cache
def _libraries() -> dict[str, str]:
    """Those that stand for others, and what TensorFlow loads."""
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
