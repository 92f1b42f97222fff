"""Creates the gradient compressor of a strategy."""

from __future__ import annotations

import functools
from typing import Any

from tfdist.collective.communicator_interface import Communicator
from tfdist.collective.gpu_communicator import GPU_BUCKET_BYTES, GpuCommunicator
from tfdist.collective.native_communicator import NativeCommunicator
from tfdist.compression.compressor import Compressor
from tfdist.compression.host_leaders import HostLeaders
from tfdist.compression.policy import Policy
from tfdist.compression.transport import Exchange
from tfdist.errors import UnsupportedError
from tfdist.strategies.communication import sized
from tfdist.strategies.group import Group


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
            return None if part is None else sized(part, options)

        def split_on_gpus(name: str, members: list[int]) -> NativeCommunicator | None:
            seconds = options.timeout_seconds
            part = group.native_part(f"{name}, GPUs", members, seconds, devices)
            return None if part is None else sized(part.with_buckets_of(GPU_BUCKET_BYTES), options)

        if len(devices) == 1:
            on_gpus = on_gpu(replicas[0])
            return [
                Exchange(
                    workers,
                    within_hosts=within_hosts,
                    split=split,
                    exact=replicas[0],
                    on_gpus=on_gpus,
                    split_on_gpus=None if on_gpus is None else split_on_gpus,
                )
            ]
        return [
            Exchange(
                sized(group.native(f"device {i}"), options),
                within_hosts=within_hosts,
                devices=HostLeaders(local, len(devices), i),
                split=functools.partial(split, suffix=f", device {i}"),
                of_all_gpus=on_gpu(replicas[i]),
            )
            for i, local in enumerate(group.native_devices(devices))
        ]

    def on_gpu(replica: Communicator) -> NativeCommunicator | None:
        return replica.on_gpu if isinstance(replica, GpuCommunicator) else None

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
