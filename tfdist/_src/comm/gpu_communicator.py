"""A communicator whose floating-point values stay on GPUs, and compressed all-reduce."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist._src.comm import native_ops, tokens
from tfdist._src.comm.communicator_interface import Communicator
from tfdist._src.comm.native_communicator import NativeCommunicator
from tfdist._src.comm.tracing import marked_buckets
from tfdist._src.native.encoding import Encoding

GPU_BUCKET_BYTES = 25 << 20
"""Tensors on GPUs are summed in collectives of about this size, as by PyTorch's DDP: the links are
faster than a host's, and each collective takes a message among the hosts before it."""


class GpuCommunicator:
    """One GPU's handle on the group of all GPUs of all workers.

    Operations on values of floating types run in the GPU's memory. Everything else passes through
    the host's, and so do integers: they are counts and indices, which are few.

    Args:
        on_gpu: this GPU's handle on a communicator of all GPUs.
        rest: the communicator of the same participants for values on the host.

    Attributes:
        on_gpu: as given.
    """

    def __init__(self, on_gpu: NativeCommunicator, rest: Communicator) -> None:
        self.on_gpu, self._rest = on_gpu, rest

    @property
    def across_workers(self) -> tuple[str, ...]:
        return (*self.on_gpu.across_workers, *self._rest.across_workers)

    @property
    def bucket_bytes(self) -> int:
        """As of a native communicator."""
        return self.on_gpu.bucket_bytes

    @property
    def size(self) -> int:
        return self._rest.size

    @property
    def rank(self) -> int:
        return self._rest.rank

    @property
    def lasting_name(self) -> str:
        return self._rest.lasting_name

    def place(self) -> tuple[Any, Any]:
        return self._rest.place()

    def all_reduce(self, tensors: Sequence[tf.Tensor], key: str = "") -> list[tf.Tensor]:
        sums: list[Any] = [None] * len(tensors)
        for floating in (True, False):
            members = [i for i, t in enumerate(tensors) if t.dtype.is_floating == floating]
            if members:
                communicator = self.on_gpu if floating else self._rest
                reduced = communicator.all_reduce([tensors[i] for i in members], key)
                for i, value in zip(members, reduced, strict=True):
                    sums[i] = tokens.apart(value)
        return sums

    def reduce_scatter(self, tensor: tf.Tensor) -> tf.Tensor:
        return tokens.apart(self._of(tensor).reduce_scatter(tensor))

    def all_gather(self, tensor: tf.Tensor, key: str = "") -> tf.Tensor:
        return tokens.apart(self._of(tensor).all_gather(tensor, key))

    def broadcast(self, tensor: tf.Tensor, root: int = 0) -> tf.Tensor:
        return tokens.apart(self._of(tensor).broadcast(tensor, root))

    def _of(self, tensor: tf.Tensor) -> Communicator:
        stays = tensor.dtype.is_floating and tensor.dtype in native_ops.TYPES
        return self.on_gpu if stays else self._rest


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
