"""Chooses the collectives of a strategy and creates its communicators."""

from __future__ import annotations

import functools
import os
import zlib
from typing import Any

import tensorflow as tf

from tfdist import native
from tfdist.cluster.net.wait_messages import say
from tfdist.collective import gpu
from tfdist.collective.communicator_interface import Alone, Communicator
from tfdist.collective.device_communicator import DeviceCommunicator
from tfdist.collective.gpu_communicator import GPU_BUCKET_BYTES, GpuCommunicator
from tfdist.collective.native_communicator import NativeCommunicator
from tfdist.collective.tensorflow_collectives import TensorFlowCommunicator
from tfdist.compression.compressor import Compressor
from tfdist.compression.host_leaders import HostLeaders
from tfdist.compression.policy import Policy
from tfdist.compression.transport import Exchange
from tfdist.errors import NativeUnavailableError, UnsupportedError
from tfdist.options import Options
from tfdist.strategies.communicators import ON_GPU
from tfdist.strategies.group import Group

COMMUNICATIONS = ("auto", "tensorflow", "native")


def choose(group: Group, communication: str) -> str:
    """Chooses the collectives, the same on all workers, all of which call this.

    Args:
        group: the workers.
        communication: this worker's setting, one of `COMMUNICATIONS`.

    Returns:
        `"native"` or `"tensorflow"`.

    Raises:
        NativeUnavailableError: the native collectives were requested and are unavailable.
        UnsupportedError: TLS is set, and TensorFlow's collectives would send unencrypted.
    """
    group.agree("communication", communication)
    tls = group.options.tls
    if group.topology.size == 1 and not group.elastic:
        return "tensorflow"
    if communication == "tensorflow":
        if tls:
            raise UnsupportedError(f'{_IN_THE_CLEAR} Choose communication="native", or {_UNSET}.')
        return "tensorflow"
    # With TLS the native collectives are the only choice, even for GPUs.
    obstacle = _obstacle(group.options, gpus=tls or communication == "native")
    obstacles = [text for text in group.exchange("native collectives", obstacle) if text]
    if not obstacles:
        return "native"
    if communication == "native":
        raise NativeUnavailableError(obstacles[0])
    if tls:
        raise UnsupportedError(f"{_IN_THE_CLEAR} {obstacles[0]} Or {_UNSET}.")
    if obstacles[0] != _GPUS and group.topology.rank == 0:
        say(f"{obstacles[0]} Falling back to TensorFlow's collectives, which are slower.")
    return "tensorflow"


_GPUS = "The worker has a GPU."
_IN_THE_CLEAR = "TLS is set, and TensorFlow's collectives send tensors in the clear."
_UNSET = "unset TFDIST_TLS_CERTIFICATE, TFDIST_TLS_KEY and TFDIST_TLS_CA on all workers"


def _obstacle(options: Options, *, gpus: bool) -> str:
    """Why this worker cannot use the native collectives; "" if it can.

    Args:
        options: the settings, of which those for TLS are used.
        gpus: whether they are wanted for gradients on a GPU.
    """
    # Listing logical devices would initialize TensorFlow before its server can be configured.
    if not gpus and tf.config.list_physical_devices("GPU"):
        return _GPUS
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
    """The devices of this process's replicas: its GPUs, else its logical CPU devices."""
    kind = "GPU" if tf.config.list_logical_devices("GPU") else "CPU"
    names = [device.name for device in tf.config.list_logical_devices(kind)]
    group.agree("number of devices", f"{len(names)} {kind}")
    return names


def are_gpus(devices: list[str]) -> bool:
    """Whether replicas train on GPUs."""
    return all("GPU" in device for device in devices)


def _sums_on_gpus(group: Group, devices: list[str]) -> bool:
    """Whether gradients are summed on GPUs, the same on all workers, all of which call this.

    Raises:
        NativeUnavailableError: that was asked for, and a GPU cannot be used.
    """
    if not are_gpus(devices):
        return False
    group.agree("TFDIST_DEVICE_ALGORITHM", group.options.device_algorithm)
    obstacles = [text for text in group.exchange("GPUs", gpu.obstacle(group.options)) if text]
    if not obstacles:
        return True
    if group.options.device_algorithm in ("own", "nccl"):
        raise NativeUnavailableError(obstacles[0])
    if group.topology.rank == 0:
        say(f"{obstacles[0]} Gradients are summed in the host's memory.")
    return False


# TensorFlow identifies a group of devices by a number, the same on all of them.
_WORKERS_KEY = 0x7FD0001
_REPLICAS_KEY = 0x7FD0002
_DEFAULT_BUCKET_BYTES = 4 << 20


def worker_communicator(group: Group, options: Any, *, native: bool) -> Communicator:
    """A communicator with one participant per worker, for values on the host."""
    if group.topology.size == 1 and not native:
        return Alone()
    if native:
        return _sized(group.native(timeout=options.timeout_seconds), options)
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
    group: Group, devices: list[str], workers: Communicator, options: Any
) -> list[Communicator]:
    """For each device, a communicator over the replicas of all workers."""
    size = len(devices) * group.topology.size
    native = isinstance(workers, NativeCommunicator)
    if size == 1 and not native:
        return [Alone()]
    timeout = options.timeout_seconds
    if (
        len(devices) == 1
        and isinstance(workers, NativeCommunicator)
        and _sums_on_gpus(group, devices)
    ):
        on_gpu = group.native(ON_GPU, timeout).with_buckets_of(GPU_BUCKET_BYTES)
        return [GpuCommunicator(_sized(on_gpu, options), workers)]
    if len(devices) == 1 and ("CPU" in devices[0] or native):
        return [workers]
    if native:
        remote = [group.native(f"device {i}", timeout) for i in range(len(devices))]
        return [
            DeviceCommunicator(local, _sized(workers_of_device, options))
            for local, workers_of_device in zip(group.native_devices(devices), remote, strict=True)
        ]
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
        )
        for i, device in enumerate(devices)
    ]


def make_compressor(
    group: Group,
    policy: Policy | None,
    devices: list[str],
    workers: Communicator,
    replicas: list[Communicator],
    options: Any,
) -> Compressor | None:
    """The gradient compressor; None for a single worker and for TensorFlow's collectives.

    Args:
        group: the workers; all of them call this.
        policy: this worker's initial policy; None to compress nothing.
        devices: the devices of this worker's replicas.
        workers: the communicator with one participant per worker.
        replicas: those of `replica_communicators`.
        options: a `tf.distribute.experimental.CommunicationOptions`.

    Raises:
        ProgramMismatchError: the workers have different policies.
        UnsupportedError: a policy is set, and these workers cannot compress.
    """
    if not isinstance(workers, NativeCommunicator):
        group.agree("compression", repr(policy))
        if policy is not None and group.topology.size > 1:
            raise cannot_compress("`compression`")
        return None

    def make_exchanges(within_hosts: bool) -> list[Exchange]:
        def split(name: str, members: list[int], *, suffix: str = "") -> NativeCommunicator | None:
            part = group.native_part(f"{name}{suffix}", members, options.timeout_seconds)
            return None if part is None else _sized(part, options)

        if len(devices) == 1:
            exact = replicas[0]
            on_gpus = exact.on_gpu if isinstance(exact, GpuCommunicator) else None
            return [
                Exchange(
                    workers, within_hosts=within_hosts, split=split, exact=exact, on_gpus=on_gpus
                )
            ]
        return [
            Exchange(
                _sized(group.native(f"device {i}"), options),
                within_hosts=within_hosts,
                devices=HostLeaders(local, len(devices), i),
                split=functools.partial(split, suffix=f", device {i}"),
            )
            for i, local in enumerate(group.native_devices(devices))
        ]

    def agree(policy: Policy | None) -> None:
        group.agree("compression", repr(policy))

    compressor = Compressor(policy, make_exchanges, devices, agree)
    group.follow(compressor)
    return compressor


def cannot_compress(asked_by: str) -> UnsupportedError:
    """The error for compression over TensorFlow's collectives.

    Args:
        asked_by: what the user can omit.
    """
    return UnsupportedError(
        "Compression needs the native collectives, and these workers use TensorFlow's. "
        f"Run `tfdist doctor` for the reason, or omit {asked_by}."
    )


def _sized(communicator: NativeCommunicator, options: Any) -> NativeCommunicator:
    size = options.bytes_per_pack
    return communicator.with_buckets_of(size) if size else communicator
