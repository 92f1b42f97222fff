"""All-reduces that send encoded values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist.collective import native_ops
from tfdist.collective.native_communicator import NativeCommunicator
from tfdist.native.encoding import Encoding


def compressed_all_reduce(
    communicator: NativeCommunicator,
    tensors: Sequence[tf.Tensor],
    encoding: Encoding,
    errors: Sequence[tf.Variable] = (),
    seed: Any = 0,
    *,
    within_hosts: bool = False,
) -> list[tf.Tensor]:
    """Sums over the ranks, sending encoded values from host to host.

    Args:
        communicator: over the ranks.
        tensors: float32, of the same shapes on all ranks.
        encoding: how values are encoded, the same on all ranks.
        errors: for each tensor a float32 variable of as many values on the host: added to the
            tensor, and afterwards what encoding it has lost on this rank. None for none.
        seed: an int64 scalar, of what is random; another one each time.
        within_hosts: whether values are encoded also from rank to rank of a host.

    Returns:
        The sums, bitwise equal on all ranks.
    """
    with tf.device(communicator.host):
        sums: list[Any] = [None] * len(tensors)
        seed = tf.cast(seed, tf.int64)
        for number, bucket in enumerate(communicator.plan(tensors)):
            reduced = native_ops.compressed_all_reduce(
                communicator.token,
                [tensors[i] for i in bucket],
                [errors[i].handle for i in bucket] if errors else [],
                # What is random differs from bucket to bucket.
                seed + number * 0x9E3779B9,
                encoding,
                within_hosts,
                communicator.name,
                f"{number}",
            )
            for i, value in zip(bucket, reduced, strict=True):
                sums[i] = value
        return sums
