"""All-reduce with encoded values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist._src.comm import native_ops, tokens
from tfdist._src.comm.native_communicator import NativeCommunicator
from tfdist._src.comm.overlap import marked_buckets
from tfdist._src.native.encoding import Encoding


def compressed_all_reduce(
    communicator: NativeCommunicator,
    tensors: Sequence[tf.Tensor],
    encoding: Encoding,
    errors: Sequence[tf.Variable] = (),
    seed: Any = 0,
    *,
    within_hosts: bool = False,
) -> list[tf.Tensor]:
    """Sums over the ranks, sending encoded values between hosts.

    Args:
        communicator: the ranks' communicator.
        tensors: float32 tensors, of the same shapes on all ranks. Where a process has several GPUs,
            each brings its own, and they are summed exactly first.
        encoding: how values are encoded, the same on all ranks.
        errors: for each tensor a float32 variable on the communicator's device with the same
            number of values: it is added to the tensor, and then set to what encoding lost on this
            rank. Empty for no error feedback.
        seed: an int64 scalar that seeds random encodings; different in each call.
        within_hosts: whether to encode values between ranks of the same host as well.

    Returns:
        The sums, bitwise identical on all ranks.
    """
    sums: list[Any] = [None] * len(tensors)
    plan = communicator.plan(tensors)
    awaited = communicator.launches(plan)
    with tf.device("CPU:0"):
        # A different seed for each bucket.
        seeds = [tf.cast(seed, tf.int64) + number * 0x9E3779B9 for number in range(len(plan))]
    name, gpu = communicator.name, communicator.gpu
    with tf.device(communicator.device):
        buckets = marked_buckets(name, "", tensors, plan, notes=gpu == 0)
        for number, bucket in enumerate(buckets):
            with tf.control_dependencies(bucket.marks):
                reduced = native_ops.compressed_all_reduce(
                    communicator.token,
                    [tensors[i] for i in bucket.members],
                    [errors[i].handle for i in bucket.members] if errors else [],
                    seeds[number],
                    encoding,
                    within_hosts,
                    name,
                    bucket.key,
                    overlaps=bucket.overlaps,
                    gpu=gpu,
                    awaited=awaited,
                )
            for i, value in zip(bucket.members, reduced, strict=True):
                sums[i] = value
        if awaited:
            sums = native_ops.await_launched(communicator.token, sums, name, "", gpu=gpu)
    return [tokens.apart(total) for total in sums] if communicator.context.gpus else sums
