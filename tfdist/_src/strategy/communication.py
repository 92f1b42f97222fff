"""Chooses the collectives of a strategy and creates its communicators."""

import os
import zlib
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist._src import native
from tfdist._src.comm import device_communicator, gpu
from tfdist._src.comm.communicator_interface import Alone, Communicator
from tfdist._src.comm.native_communicator import CoreCommunicator
from tfdist._src.comm.tensorflow_collectives import TensorFlowCommunicator
from tfdist._src.group import Group
from tfdist._src.log import logger
from tfdist._src.native import nvidia
from tfdist._src.options import Options, Variable
from tfdist.errors import NativeUnavailableError, UnsupportedError

COMMUNICATIONS = ("auto", "tensorflow", "native")


def check_communication(communication: str) -> None:
    """Checks the `communication` argument of a strategy.

    Raises:
        ValueError: the argument is none of `COMMUNICATIONS`.
    """
    if communication not in COMMUNICATIONS:
        raise ValueError(
            f"`communication` must be one of {', '.join(map(repr, COMMUNICATIONS))}. "
            f"Received: {communication!r}."
        )


def choose(group: Group, communication: str) -> str:
    """Chooses the collectives, which are the same on all workers.

    All workers must call this function.

    Args:
        group: the workers.
        communication: this worker's setting, one of `COMMUNICATIONS`.

    Returns:
        `"native"` or `"tensorflow"`.

    Raises:
        NativeUnavailableError: the native collectives were requested and are unavailable.
        UnsupportedError: TLS is required, but TensorFlow's collectives would send data unencrypted.
    """
    group.agree("communication", communication)
    tls = group.options.tls
    if group.topology.size == 1 and not group.elastic:
        return "tensorflow"
    if communication == "tensorflow":
        if tls:
            raise UnsupportedError(f'{_IN_THE_CLEAR} Choose communication="native", or {_UNSET}.')
        return "tensorflow"
    # With TLS, the native collectives are the only choice, even for GPUs that are not NVIDIA's.
    obstacle = _obstacle(group.options, any_gpus=tls or communication == "native")
    obstacles = [text for text in group.exchange("native collectives", obstacle) if text]
    if not obstacles:
        return "native"
    if communication == "native":
        raise NativeUnavailableError(obstacles[0])
    if tls:
        raise UnsupportedError(f"{_IN_THE_CLEAR} {obstacles[0]} Or {_UNSET}.")
    if group.topology.rank == 0:
        slower = "" if obstacles[0].startswith(_OTHER_GPUS) else ", which are slower"
        logger.warning(f"{obstacles[0]} Falling back to TensorFlow's collectives{slower}.")
    return "tensorflow"


_OTHER_GPUS = "The native collectives work on NVIDIA's GPUs only"
_IN_THE_CLEAR = "TLS is set, and TensorFlow's collectives send tensors in the clear."
_UNSET = "unset TFDIST_TLS_CERTIFICATE, TFDIST_TLS_KEY and TFDIST_TLS_CA on all workers"


def _obstacle(options: Options, *, any_gpus: bool) -> str:
    """Returns why this worker cannot use the native collectives; "" if it can.

    Args:
        options: the settings for TLS and the driver.
        any_gpus: whether the native collectives may be used with GPUs that are not NVIDIA's.
            Gradients are then copied from these GPUs to the host.
    """
    # Listing logical devices would initialize TensorFlow before its server can be configured.
    if not any_gpus and tf.config.list_physical_devices("GPU"):
        try:
            nvidia.Driver(options.cuda_library)
        except NativeUnavailableError as error:
            return f"{_OTHER_GPUS} ({error})."
    try:
        core = native.load().library
        native.load_ops()
    except NativeUnavailableError as error:
        return str(error)
    files = (options.tls_certificate, options.tls_key, options.tls_ca)
    if options.tls and core.tfd_check_tls(*map(os.fsencode, files)):
        return str(core.tfd_error().decode(errors="replace"))
    return ""


def local_devices(group: Group) -> list[str]:
    """Returns the devices of this process's replicas: its GPUs, else its logical CPU devices."""
    kind = "GPU" if tf.config.list_logical_devices("GPU") else "CPU"
    names = [device.name for device in tf.config.list_logical_devices(kind)]
    group.agree("number of devices", f"{len(names)} {kind}")
    return names


def are_gpus(devices: list[str]) -> bool:
    """Whether replicas train on GPUs."""
    return all("GPU" in device for device in devices)


def sums_on_gpus(group: Group, devices: list[str]) -> bool:
    """Whether all workers sum gradients on GPUs.

    All workers must call this function, and get the same result.

    Raises:
        NativeUnavailableError: sums on GPUs were requested, but a GPU cannot compute them.
    """
    if not are_gpus(devices):
        return False
    group.agree(Variable.DEVICE_ALGORITHM, group.options.device_algorithm)
    obstacle = gpu.obstacle(devices, group.options)
    obstacles = [text for text in group.exchange("GPUs", obstacle) if text]
    if not obstacles:
        return True
    if group.options.device_algorithm in ("p2p", "nccl"):
        raise NativeUnavailableError(obstacles[0])
    if group.topology.rank == 0:
        logger.warning(f"{obstacles[0]} Gradients are summed in the host's memory.")
    return False


# TensorFlow identifies a group of devices by a key, which is the same on all devices of the group.
_WORKERS_KEY = 0x7FD0001
_REPLICAS_KEY = 0x7FD0002
_DEFAULT_BUCKET_BYTES = 4 << 20


def worker_communicator(group: Group, options: Any, *, native: bool) -> Communicator:
    """Returns a communicator with one participant per worker, for values on the host."""
    if group.topology.size == 1 and not native:
        return Alone()
    if native:
        return sized(group.native(timeout=options.timeout_seconds), options)
    return TensorFlowCommunicator(
        tf.config.list_logical_devices("CPU")[0].name,
        rank=group.topology.rank,
        size=group.topology.size,
        group_key=_WORKERS_KEY,
        implementation="RING",
        timeout=options.timeout_seconds or group.options.collective_timeout,
        bucket_bytes=options.bytes_per_pack or _DEFAULT_BUCKET_BYTES,
    )


def replica_communicators(
    group: Group, devices: list[str], workers: Communicator, options: Any, *, native: bool
) -> list[Communicator]:
    """Returns a communicator for each device, over the replicas of all workers."""
    size = len(devices) * group.topology.size
    if size == 1 and not isinstance(workers, CoreCommunicator):
        return [Alone()]
    if native:
        through_hosts = _through_hosts(group, devices, workers, options)
        if not sums_on_gpus(group, devices):
            return through_hosts
        on_gpus = group.native_gpus(devices, options.timeout_seconds)
        return [
            device_communicator.GpuCommunicator(
                sized(on_gpu.with_buckets_of(device_communicator.GPU_BUCKET_BYTES), options), rest
            )
            for on_gpu, rest in zip(on_gpus, through_hosts, strict=True)
        ]
    if len(devices) == 1 and "CPU" in devices[0]:
        return [workers]
    # If there is a single worker, the user may have listed its devices in any order.
    numbers = [tf.DeviceSpec.from_string(device).device_index for device in devices]
    places = None if group.topology.size > 1 else [sorted(numbers).index(n) for n in numbers]
    local_key = zlib.crc32(" ".join(devices).encode()) % 2**30
    return [
        TensorFlowCommunicator(
            device,
            rank=group.topology.rank * len(devices) + i,
            size=size,
            group_key=_REPLICAS_KEY if group.topology.size > 1 else local_key,
            implementation=options.implementation.value,
            timeout=options.timeout_seconds or group.options.collective_timeout,
            bucket_bytes=options.bytes_per_pack or _DEFAULT_BUCKET_BYTES,
            places=places,
        )
        for i, device in enumerate(devices)
    ]


def part_communicators(
    group: Group, name: str, members: list[int], gpus: Sequence[str]
) -> tuple[CoreCommunicator, Communicator] | tuple[None, None]:
    """Returns two communicators of some workers: for values on the host, and for replicas' values.

    All workers must call this function. On a worker that is not a member, both results are None.

    Args:
        group: all workers.
        name: as for `Group.native_part`.
        members: as for `Group.native_part`.
        gpus: this worker's GPU if sums are computed on GPUs; else empty.
    """
    part = group.native_part(name, members)
    on_gpu = group.native_part(f"{name}, GPUs", members, gpus=gpus) if gpus else None
    if part is None:
        return None, None
    if on_gpu is None:
        return part, part
    return part, device_communicator.GpuCommunicator(
        on_gpu.with_buckets_of(device_communicator.GPU_BUCKET_BYTES), part
    )


def _through_hosts(
    group: Group, devices: list[str], workers: Communicator, options: Any
) -> list[Communicator]:
    """Returns the native communicators of the replicas, which sum in the memory of the hosts."""
    if len(devices) == 1:
        return [workers]
    local = group.native_devices(devices)
    if not isinstance(workers, CoreCommunicator):
        return [*local]
    remote = [group.native(f"device {i}", options.timeout_seconds) for i in range(len(devices))]
    return [
        device_communicator.DeviceCommunicator(device, sized(workers_of_device, options))
        for device, workers_of_device in zip(local, remote, strict=True)
    ]


def sized(communicator: CoreCommunicator, options: Any) -> CoreCommunicator:
    """Returns the communicator, with the user's bucket size if the user has set one."""
    size = options.bytes_per_pack
    return communicator.with_buckets_of(size) if size else communicator
