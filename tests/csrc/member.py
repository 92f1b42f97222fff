"""A rank over the native core without TensorFlow: `python -m tests.csrc.member`, with TF_CONFIG.

It reduces much data again and again, and prints the error that ends this.
"""

from __future__ import annotations

import ctypes

from tfdist import native
from tfdist.cluster import Mesh, connect, from_environment, meet
from tfdist.native.api import Setup
from tfdist.options import Options

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
        silence_timeout_seconds=options.link_timeout,
        stall_seconds=options.stall_warning,
        timeout_seconds=options.collective_timeout,
        start_seconds=options.start_timeout,
        algorithm=options.algorithm.encode(),
    )


def main() -> None:
    options = Options.from_environment()
    core = native.load().library
    session = meet(from_environment(), options)
    mesh = connect(session, "test", range(session.size), options, core.tfd_segment_bytes)
    assert mesh is not None
    number = ctypes.c_int64()
    taken = setup(mesh, options)
    mesh.hand_over()
    assert core.tfd_create(ctypes.byref(taken), ctypes.byref(number)) == 0, core.tfd_error()
    data = (ctypes.c_float * _COUNT)()
    code, calls = 0, 0
    while code == 0:
        code = core.tfd_all_reduce(number, b"x", data, data, _COUNT, _FLOAT32, _SUM)
        calls += 1
        if calls == 1:
            print("RUNNING", flush=True)
    print("ERROR", code, core.tfd_error().decode(), flush=True)
    core.tfd_close(number)
    session.close()


if __name__ == "__main__":
    main()
