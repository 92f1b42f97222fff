"""A communicator of workers with one GPU each, on which the sums of gradients stay."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist.collective.native_communicator import NativeCommunicator

GPU_BUCKET_BYTES = 25 << 20
"""Tensors on GPUs are summed in collectives of about this size, as by PyTorch's DDP: the links are
faster than a host's, and each collective takes a message among the hosts before it."""


class GpuCommunicator:
    """One GPU's handle on the group of all workers.

    Sums of floating types are computed in the GPU's memory. Everything else passes through the
    host's, and so do integers: they are counts, which are few.

    Args:
        on_gpu: a communicator of all workers whose operations run on the GPU.
        workers: the communicator of all workers for values on the host.
    """

    def __init__(self, on_gpu: NativeCommunicator, workers: NativeCommunicator) -> None:
        self._on_gpu, self._workers = on_gpu, workers

    @property
    def across_workers(self) -> tuple[NativeCommunicator, ...]:
        """The communicators that sums go through."""
        return (self._on_gpu, self._workers)

    @property
    def on_gpu(self) -> NativeCommunicator:
        """The one whose operations run on the GPU."""
        return self._on_gpu

    @property
    def size(self) -> int:
        return self._workers.size

    @property
    def rank(self) -> int:
        return self._workers.rank

    @property
    def lasting_name(self) -> str:
        return self._workers.lasting_name

    def place(self) -> tuple[Any, Any]:
        return self._workers.place()

    def all_reduce(self, tensors: Sequence[tf.Tensor], key: str = "") -> list[tf.Tensor]:
        sums: list[Any] = [None] * len(tensors)
        for floating, communicator in ((True, self._on_gpu), (False, self._workers)):
            members = [i for i, t in enumerate(tensors) if t.dtype.is_floating == floating]
            if members:
                reduced = communicator.all_reduce([tensors[i] for i in members], key)
                for i, value in zip(members, reduced, strict=True):
                    # An operation colocated with the sum itself would share the token's device, and
                    # so need a kernel for GPUs.
                    sums[i] = tf.identity(value)
        return sums

    def reduce_scatter(self, tensor: tf.Tensor) -> tf.Tensor:
        return self._workers.reduce_scatter(tensor)

    def all_gather(self, tensor: tf.Tensor, key: str = "") -> tf.Tensor:
        return self._workers.all_gather(tensor, key)

    def broadcast(self, tensor: tf.Tensor) -> tf.Tensor:
        return self._workers.broadcast(tensor)
