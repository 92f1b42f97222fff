"""Workers that train on GPUs which a driver of threads stands for, on any machine.

The libraries that stand for CUDA's driver and NCCL are those of the C++ tests. The kernel that sums
tensors of GPUs takes those of CPUs here, in the place of TensorFlow's GPUs.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
from pathlib import Path

from tests.csrc.compiling import Toolchain
from tfdist import native
from tfdist.native import lock, recipe, tensorflow_package
from tfdist.options import NativeOptions

_SOURCE = Path(__file__).with_suffix(".cc")
_SECONDS = 1500
# Keeps the libraries.
_FOLDER = Path(__file__).parents[1] / ".pytest_cache" / "d" / "gpus"
_made: dict[str, str] = {}


def variables(rank: int, transport: str) -> dict[str, str]:
    """The environment of a worker.

    Args:
        rank: its GPU's number.
        transport: how sums are to be computed; "" for whichever is best.
    """
    if not _made:
        (_FOLDER / "fakes").mkdir(parents=True, exist_ok=True)
        with lock.held(_FOLDER / "lock", _SECONDS, print):
            _made.update(_make(_FOLDER))
    return {
        "FAKE_CUDA": _made["cuda"],  # in whose streams the other one works
        "TFDIST_CUDA_LIBRARY": _made["cuda"],
        "TFDIST_NCCL_LIBRARY": _made["nccl"],
        "TFDIST_DEVICE_ALGORITHM": transport,
        "TESTS_GPU": str(rank),
        "TESTS_GPU_OPS": _made["ops"],
    }


def stand_in() -> None:
    """Has the strategies of this process take its CPU for a GPU."""
    import tensorflow as tf

    from tfdist.collective import gpu
    from tfdist.collective.gpu import Gpu
    from tfdist.strategies import communication

    native.load_ops()
    tf.load_op_library(os.environ["TESTS_GPU_OPS"])

    def find(options):
        # The driver of threads has its kernels built in.
        device = tf.config.list_logical_devices("CPU")[0].name
        return Gpu(device, int(os.environ["TESTS_GPU"]), os.devnull, options.nccl_library)

    gpu.find = find
    communication.are_gpus = lambda devices: True


def launches() -> int:
    """How many kernels of tfdist the driver has run in this process."""
    return int(ctypes.CDLL(os.environ["TFDIST_CUDA_LIBRARY"]).fake_launches())


def nccl_calls(function: str) -> int:
    """How often a function of NCCL was called in this process."""
    library = ctypes.CDLL(os.environ["TFDIST_NCCL_LIBRARY"])
    return int(library.fake_nccl_calls(function.encode()))


def _make(folder: Path) -> dict[str, str]:
    build = native.ensure(NativeOptions.from_environment())
    toolchain = Toolchain(("-O1",), folder / "fakes", build.core)
    made = {name: str(path) for name, path in toolchain.fakes().items()}
    found = recipe.read(tensorflow_package.find())
    ops = folder / f"ops-{found.key}-{_SOURCE.stat().st_mtime_ns}.so"
    if not ops.exists():
        unfinished = folder / f"{os.getpid()}.so"
        libraries = [str(build.ops), str(build.core), f"-Wl,-rpath,{build.folder}"]
        flags = (*found.compile_ops, *found.tensorflow.link_flags)
        done = subprocess.run(
            [*toolchain.compiler, str(_SOURCE), "-shared", "-o", unfinished, *libraries, *flags],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=_SECONDS,
        )
        assert done.returncode == 0, done.stdout
        for old in folder.glob("ops-*"):
            old.unlink()
        unfinished.rename(ops)
    return {**made, "ops": str(ops)}
