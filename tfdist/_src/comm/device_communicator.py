"""Communicators over the devices of a process, or of all workers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist._src import native
from tfdist._src.cluster import Mesh
from tfdist._src.cluster.mesh.mesh import connect_threads
from tfdist._src.comm import native_ops
from tfdist._src.comm.buckets import pack, unpack
from tfdist._src.comm.native_communicator import NativeCommunicator, open_mesh
from tfdist._src.options import Options


def open_local_communicators(
    name: str, ranks: Sequence[str], options: Options
) -> list[NativeCommunicator]:
    """Connects ranks that are threads of this process.

    Args:
        name: the group's name.
        ranks: the name of each rank in messages.
        options: the settings.

    Returns:
        The communicator of each rank.

    Raises:
        NativeUnavailableError: the core cannot be compiled or loaded here.
        OSError: out of memory or file descriptors.
        ValueError: `TFDIST_ALGORITHM` is not the name of an algorithm.
    """
    meshes = _connected(name, ranks)
    try:
        return [open_mesh(mesh, options) for mesh in meshes]
    finally:
        for mesh in meshes:
            mesh.close()  # Frees those without a communicator after an error.


def reopen_local_communicators(
    communicators: Sequence[NativeCommunicator], name: str, ranks: Sequence[str], options: Options
) -> None:
    """Connects them once more, which have been closed, under the same names.

    Raises:
        As `open_local_communicators`.
    """
    meshes = _connected(name, ranks)
    try:
        for communicator, mesh in zip(communicators, meshes, strict=True):
            communicator.context.open(mesh, options, None)
    finally:
        for mesh in meshes:
            mesh.close()


def _connected(name: str, ranks: Sequence[str]) -> list[Mesh]:
    return connect_threads(name, ranks, native.load().library.tfd_segment_bytes)


class DeviceCommunicator:
    """One device's handle on the group of all devices of all workers.

    The devices of a worker divide the traffic between workers: each exchanges its shard of the
    worker's sums with the same device of the other workers.

    Args:
        devices: the communicator over this worker's devices.
        workers: the communicator over this device of all workers.
    """

    def __init__(self, devices: NativeCommunicator, workers: NativeCommunicator) -> None:
        self._devices, self._workers = devices, workers

    @property
    def across_workers(self) -> tuple[str, ...]:
        return self._workers.across_workers

    @property
    def size(self) -> int:
        return self._workers.size * self._devices.size

    @property
    def rank(self) -> int:
        return self._workers.rank * self._devices.size + self._devices.rank

    @property
    def lasting_name(self) -> str:
        return ""  # Nothing finds the two by one name.

    def place(self) -> tuple[Any, Any]:
        worker, workers = self._workers.place()
        device, devices = self._devices.place()
        return worker * devices + device, workers * devices

    def all_reduce(self, tensors: Sequence[tf.Tensor], key: str = "") -> list[tf.Tensor]:
        group = self._devices
        sums: list[Any] = [None] * len(tensors)
        with tf.device(group.device):
            summable = [native_ops.to_native_summable(t) for t in tensors]
            buckets = self._workers.plan(summable)
            parts = []
            for number, bucket in enumerate(buckets):
                flat = pack([summable[i] for i in bucket])
                padded = tf.pad(flat, [[0, -tf.size(flat) % group.size]])
                parts.append(
                    native_ops.reduce_scatter(group.token, padded, "sum", group.name, f"{number}")
                )
            # `all_reduce` starts with its last tensors, and the first parts are available first.
            parts = self._workers.all_reduce(parts[::-1], key)[::-1]
            for number, (bucket, part) in enumerate(zip(buckets, parts, strict=True)):
                flat = native_ops.all_gather(group.token, part, group.name, f"{number}")
                values = unpack(flat, [summable[i] for i in bucket])
                for i, value in zip(bucket, values, strict=True):
                    sums[i] = value
            return [native_ops.from_summable(s, t) for s, t in zip(sums, tensors, strict=True)]

    def reduce_scatter(self, tensor: tf.Tensor) -> tf.Tensor:
        rank, size = self.place()
        part = tf.shape(tensor)[0] // size
        return self.all_reduce([tensor])[0][rank * part : (rank + 1) * part]

    def all_gather(self, tensor: tf.Tensor, key: str = "") -> tf.Tensor:
        return self._workers.all_gather(self._devices.all_gather(tensor, key), key)

    def broadcast(self, tensor: tf.Tensor, root: int = 0) -> tf.Tensor:
        worker, device = divmod(root, self._devices.size)
        return self._workers.broadcast(self._devices.broadcast(tensor, device), worker)
