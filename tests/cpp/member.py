"""A rank over the native core without TensorFlow: `python -m tests.cpp.member`, with TF_CONFIG.

It reduces much data again and again, and prints the error that ends this. With an argument, the
library made of on_gpu.cc, the data are on a GPU.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable

from tfdist._src import native
from tfdist._src.cluster import Mesh, connect, from_environment, meet
from tfdist._src.native.api import Setup
from tfdist._src.options import Options

_COUNT = 8 << 20
_FLOAT32, _SUM = 7, 0


def setup(mesh: Mesh, options: Options) -> Setup:
    names = [name.encode() for name in mesh.ranks]
    return Setup(
        name=mesh.name.encode(),
        rank=mesh.rank,
        size=mesh.size,
        ranks=(ctypes.c_char_p * mesh.size)(*names),
        hosts=(ctypes.c_int * mesh.size)(*mesh.hosts),
        control=(ctypes.c_int * mesh.size)(*mesh.control),
        data=(ctypes.c_int * mesh.size)(*mesh.data),
        segment=mesh.segment,
        segment_bytes=mesh.segment_bytes,
        silence_warning_seconds=options.silence_warning,
        silence_timeout_seconds=options.heartbeat_timeout,
        stall_seconds=options.stall_warning,
        timeout_seconds=options.collective_timeout,
        start_seconds=options.start_timeout,
        algorithm=options.algorithm.encode(),
    )


def use_gpu(taken: Setup, options: Options) -> None:
    taken.gpus = 1
    taken.gpu_numbers = (ctypes.c_int * 1)(0)
    taken.gpu_kernels = (ctypes.c_char_p * 1)(os.devnull.encode())  # the driver has its own
    taken.cuda_library = options.cuda_library.encode()
    taken.nccl_library = options.nccl_library.encode()
    taken.device_algorithm = options.device_algorithm.encode()


def on_host(core: ctypes.CDLL, number: ctypes.c_int64) -> Callable[[], tuple[int, str]]:
    data = (ctypes.c_float * _COUNT)()

    def run() -> tuple[int, str]:
        code = core.tfd_all_reduce(number, b"x", data, data, _COUNT, _FLOAT32, _SUM)
        return code, core.tfd_error().decode()

    return run


def on_gpu(library: str, number: ctypes.c_int64) -> Callable[[], tuple[int, str]]:
    call = ctypes.CDLL(library).all_reduce_on_gpu
    call.restype = ctypes.c_char_p
    code = ctypes.c_int()

    def run() -> tuple[int, str]:
        said = call(number, b"x", ctypes.c_size_t(_COUNT), ctypes.byref(code))
        return code.value, said.decode()

    return run


def main() -> None:
    options = Options.from_environment()
    core = native.load().library
    session = meet(from_environment(), options)
    mesh = connect(session, "test", range(session.size), options, core.tfd_segment_bytes)
    assert mesh is not None
    number = ctypes.c_int64()
    taken = setup(mesh, options)
    libraries = sys.argv[1:]
    if libraries:
        use_gpu(taken, options)
    mesh.hand_over()
    assert core.tfd_create(ctypes.byref(taken), ctypes.byref(number)) == 0, core.tfd_error()
    run = on_gpu(libraries[0], number) if libraries else on_host(core, number)
    code, said = run()
    print("RUNNING", flush=True)
    while code == 0:
        code, said = run()
    print("ERROR", code, said, flush=True)
    core.tfd_close(number)
    session.close()


if __name__ == "__main__":
    main()
