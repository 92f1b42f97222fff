"""Communicators that connect the devices of one process, or the devices of all workers."""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist._src import native
from tfdist._src.cluster import Mesh
from tfdist._src.cluster.mesh.mesh import connect_threads
from tfdist._src.comm import native_ops, tokens
from tfdist._src.comm.buckets import pack, unpack
from tfdist._src.comm.communicator_interface import Communicator
from tfdist._src.comm.native_communicator import CoreCommunicator, open_mesh
from tfdist._src.comm.tracing import marked_buckets
from tfdist._src.native.api import Encoding
from tfdist._src.options import Options


def open_local_communicators(
    name: str, ranks: Sequence[str], options: Options
) -> list[CoreCommunicator]:
    """Creates the communicators of ranks that are threads of this process.

    Args:
        name: the group's name.
        ranks: for each rank, its name in messages to users.
        options: the settings.

    Returns:
        The communicators, one for each rank.

    Raises:
        NativeUnavailableError: the core cannot be compiled or loaded here.
        OSError: the process has run out of memory or of file descriptors.
        ValueError: `TFDIST_ALGORITHM` is not the name of an algorithm.
    """
    meshes = _connected(name, ranks)
    try:
        return [open_mesh(mesh, options) for mesh in meshes]
    finally:
        for mesh in meshes:
            mesh.close()  # If an error occurred, frees the meshes without a communicator.


def reopen_local_communicators(
    communicators: Sequence[CoreCommunicator], name: str, ranks: Sequence[str], options: Options
) -> None:
    """Opens closed communicators of `open_local_communicators` again.

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
    """Connects one device of this worker with all other devices of all workers.

    The devices of a worker first sum their values, and each device receives one shard of the sum.
    The devices with the same index on all workers then sum this shard. Each device thus handles an
    equal part of the traffic between workers.

    Args:
        devices: the communicator that connects the devices of this worker.
        workers: the communicator that connects this device with the device of the same index on
            every other worker.
    """

    def __init__(self, devices: CoreCommunicator, workers: CoreCommunicator) -> None:
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
        return ""  # The core has one name for each of the two communicators.

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
            # The first parts are available first, but `all_reduce` starts with its last tensors.
            # Therefore the order is reversed.
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


GPU_BUCKET_BYTES = 25 << 20
"""Tensors on GPUs are summed in collectives of about this size, as in PyTorch's DDP: links between
GPUs are faster than a host's, and each collective needs a message among the hosts first."""


class GpuCommunicator:
    """Connects one GPU of this worker with all other GPUs of all workers.

    Operations on floating-point tensors run in the GPU's memory. All other tensors pass through the
    host's memory. There are few of them, mainly integers such as counts and indices.

    Args:
        on_gpu: this GPU's communicator with all other GPUs, for floating-point tensors.
        rest: the communicator of the same participants, for all other tensors.

    Attributes:
        on_gpu: see the argument.
    """

    def __init__(self, on_gpu: CoreCommunicator, rest: Communicator) -> None:
        self.on_gpu, self._rest = on_gpu, rest

    @property
    def across_workers(self) -> tuple[str, ...]:
        return (*self.on_gpu.across_workers, *self._rest.across_workers)

    @property
    def bucket_bytes(self) -> int:
        """The approximate number of bytes that one collective on GPUs reduces."""
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
    communicator: CoreCommunicator,
    tensors: Sequence[tf.Tensor],
    encoding: Encoding,
    errors: Sequence[tf.Variable] = (),
    seed: Any = 0,
    *,
    within_hosts: bool = False,
) -> list[tf.Tensor]:
    """Sums tensors over the ranks. Values are encoded before they are sent to other hosts.

    Args:
        communicator: the communicator that connects the ranks.
        tensors: float32 tensors with the same shapes on all ranks. If a process has several GPUs,
            each GPU passes its own tensors, and the process first sums these without encoding.
        encoding: the encoding of the values, the same on all ranks.
        errors: the variables for error feedback, one float32 variable for each tensor, with the
            same number of values, on the communicator's device. This function adds each variable to
            its tensor, and then assigns this rank's encoding error to the variable. If empty, no
            error feedback is applied.
        seed: an int64 scalar, the seed of encodings that round at random. Pass a different seed in
            each call.
        within_hosts: whether to also encode values that ranks of the same host exchange.

    Returns:
        The sums, bitwise identical on all ranks.
    """
    sums: list[Any] = [None] * len(tensors)
    plan = communicator.plan(tensors)
    awaited = communicator.launches(plan)
    with tf.device("CPU:0"):
        # Each bucket needs a different seed.
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
