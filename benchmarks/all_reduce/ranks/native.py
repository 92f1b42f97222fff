"""Runs a rank of the backend `native`: connects the ranks in Python, and then measures in C."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence

from benchmarks.all_reduce.ranks import rank
from benchmarks.all_reduce.ranks.mesh import connect


def main() -> None:
    """Connects to the other ranks, and executes the driver's commands.

    The command line has three arguments before those of `rank.Arguments`: the path of the core's
    library; the path of the library that is compiled from native.c; and 1 to reduce in place,
    otherwise 0.
    """
    core_path, loop_path, in_place = sys.argv[1:4]
    arguments = rank.read_arguments()
    core = ctypes.CDLL(core_path)
    core.tfd_segment_bytes.restype = ctypes.c_size_t
    mesh = connect(arguments, core.tfd_segment_bytes)
    loop = ctypes.CDLL(loop_path)
    loop.serve.restype = ctypes.c_char_p
    failure = loop.serve(
        arguments.control.encode(),
        int(in_place),
        mesh.rank,
        mesh.size,
        (ctypes.c_char_p * mesh.size)(*(name.encode() for name in mesh.ranks)),
        _ints(mesh.hosts),
        _ints(mesh.control),
        _ints(mesh.data),
        mesh.segment,
        ctypes.c_size_t(mesh.segment_bytes),
    )
    if failure:
        sys.exit(failure.decode())


def _ints(values: Sequence[int]) -> ctypes.Array[ctypes.c_int]:
    return (ctypes.c_int * len(values))(*values)


if __name__ == "__main__":
    main()
