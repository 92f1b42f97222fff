"""Creates the gradient compressor of a strategy."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from tfdist._src.comm.communicator_interface import Communicator
from tfdist._src.comm.gpu_communicator import GPU_BUCKET_BYTES, GpuCommunicator
from tfdist._src.comm.native_communicator import NativeCommunicator
from tfdist._src.compression.compressor import Compressor
from tfdist._src.compression.host_leaders import HostLeaders
from tfdist._src.compression.policy import Policy
from tfdist._src.compression.transport import Exchange, OnGpus
from tfdist._src.group.group import Group
from tfdist._src.strategy.communication import sized
from tfdist.errors import UnsupportedError


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

    def part(
        name: str, members: list[int], *, suffix: str = "", gpus: Sequence[str] = ()
    ) -> NativeCommunicator | None:
        name = f"{name}{suffix}, GPUs" if gpus else f"{name}{suffix}"
        made = group.native_part(name, members, options.timeout_seconds, gpus)
        if made is None:
            return None
        return sized(made.with_buckets_of(GPU_BUCKET_BYTES) if gpus else made, options)

    def make_exchanges(within_hosts: bool) -> list[Exchange]:
        if len(devices) == 1:
            of_gpu = None
            if isinstance(replicas[0], GpuCommunicator):
                split = functools.partial(part, gpus=devices)
                of_gpu = OnGpus(replicas[0].on_gpu, split)
            return [
                Exchange(
                    workers,
                    within_hosts=within_hosts,
                    split=part,
                    exact=replicas[0],
                    on_gpus=of_gpu,
                )
            ]
        exchanges = []
        for i, local in enumerate(group.native_devices(devices)):
            route, exact = None, None
            of_workers = sized(group.native(f"device {i}"), options)
            if isinstance(replicas[i], GpuCommunicator):
                route = route_of_gpu(i, local)
                exact = GpuCommunicator(route.workers, of_workers)
            exchanges.append(
                Exchange(
                    of_workers,
                    within_hosts=within_hosts,
                    devices=HostLeaders(local, len(devices), i),
                    split=functools.partial(part, suffix=f", device {i}"),
                    exact=exact,
                    on_gpus=route,
                )
            )
        return exchanges

    def route_of_gpu(i: int, local: NativeCommunicator) -> OnGpus:
        topology, gpus, replica = group.topology, devices[i : i + 1], replicas[i]
        here = part("devices", [topology.rank], gpus=devices)
        of_workers = part(f"device {i}", list(range(topology.size)), gpus=gpus)
        assert here and of_workers and isinstance(replica, GpuCommunicator)
        neighbors = GpuCommunicator(here.on_gpu(i), local)
        return OnGpus(
            of_workers,
            functools.partial(part, suffix=f", device {i}", gpus=gpus),
            HostLeaders(neighbors, len(devices), i),
            replica.on_gpu,
        )

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
