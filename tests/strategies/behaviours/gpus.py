"""What computes sums of what is on GPUs, which threads stand for."""

from __future__ import annotations

import tensorflow as tf

from tests import gpus

_NCCL = "ncclAllReduce"


def reduce(strategy):
    """The kernels, NCCL's calls and the sums of a reduction of several types."""
    launches, calls = gpus.launches(), gpus.nccl_calls(_NCCL)
    communicator = strategy.extended.replicas[0]
    rank = communicator.rank + 1
    values = [
        tf.fill([5], float(rank)),
        tf.fill([3], rank),
        tf.fill([7], tf.cast(2 * rank, "half")),
    ]
    sums = communicator.all_reduce(values)
    found = [value.numpy()[0].item() for value in sums]
    return gpus.launches() - launches, gpus.nccl_calls(_NCCL) - calls, found


def reduce_much(strategy):
    """The kernels and NCCL's calls of the sum of a tensor that is larger than kernels are for."""
    communicator = strategy.extended.replicas[0]
    communicator.all_reduce([tf.ones([100])])
    launches, calls = gpus.launches(), gpus.nccl_calls(_NCCL)
    communicator.all_reduce([tf.ones([100_000])])
    return gpus.launches() - launches, gpus.nccl_calls(_NCCL) - calls
