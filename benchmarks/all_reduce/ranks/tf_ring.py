"""Runs a rank of the backend `tf_ring`: TensorFlow's collectives in a loop in a `tf.function`."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from benchmarks.all_reduce.ranks import rank
from benchmarks.all_reduce.ranks.tensorflow_loop import serve_reduction
from tfdist._src.internals.tensorflow import start_server


def main() -> None:
    """Starts TensorFlow's server of this rank, and executes the driver's commands."""
    arguments = rank.read_arguments()
    leader = "/job:worker/replica:0/task:0"
    start_server({"worker": arguments.addresses}, "worker", arguments.rank, leader)

    def reduce(data: Any, key: Any) -> Any:
        return tf.raw_ops.CollectiveReduceV2(
            input=data,
            group_size=arguments.size,
            group_key=1,
            instance_key=key,
            ordering_token=[],
            merge_op="Add",
            final_op="Id",
            communication_hint="ring",
        )

    device = f"/job:worker/replica:0/task:{arguments.rank}/device:CPU:0"
    serve_reduction(arguments, reduce, device)


if __name__ == "__main__":
    main()
