"""Runs a rank of the backend `native_op`: tfdist's all-reduce in a loop in a `tf.function`."""

from __future__ import annotations

from typing import Any

from benchmarks.all_reduce.ranks import rank
from benchmarks.all_reduce.ranks.mesh import connect
from benchmarks.all_reduce.ranks.tensorflow_loop import serve_reduction
from tfdist._src import native
from tfdist._src.cluster import Mesh
from tfdist._src.comm.native_communicator import open_mesh
from tfdist._src.options import Options


def main() -> None:
    """Connects to the other ranks, and executes the driver's commands."""
    arguments = rank.read_arguments()
    connected = connect(arguments, native.load().library.tfd_segment_bytes)
    communicator = open_mesh(Mesh(**vars(connected)), Options.from_environment())

    def reduce(data: Any, key: Any) -> Any:
        return communicator.all_reduce([data])[0]

    serve_reduction(arguments, reduce, communicator.device)


if __name__ == "__main__":
    main()
