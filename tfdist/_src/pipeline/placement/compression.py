"""Compression of gradients between pipelines: of each stage, among the workers that hold it."""

from __future__ import annotations

from tfdist._src.comm.communicator_interface import Communicator
from tfdist._src.comm.gpu_communicator import GPU_BUCKET_BYTES, GpuCommunicator
from tfdist._src.comm.native_communicator import NativeCommunicator
from tfdist._src.compression.compressor import Compressor
from tfdist._src.compression.policy import Policy
from tfdist._src.compression.transport import Exchange, OnGpus, is_shared_out
from tfdist._src.group.group import Group
from tfdist._src.pipeline.placement.rank_grid import RankGrid


def make_compressor(
    group: Group,
    policy: Policy | None,
    device: str,
    data: Communicator,
    exact: Communicator,
    mesh: RankGrid,
) -> Compressor | None:
    """The compressor of this worker's gradients; None with a single pipeline.

    Args:
        group: all workers, which must call this together.
        policy: this worker's compression policy; None for no compression so far.
        device: this worker's device.
        data: the communicator of the workers that hold the same stages.
        exact: what sums their gradients without compression.
        mesh: the mesh of all workers.

    Raises:
        ProgramMismatchError: the workers' policies differ.
    """

    def agree(policy: Policy | None) -> None:
        group.agree("compression", repr(policy))

    if not isinstance(data, NativeCommunicator):
        agree(policy)
        return None
    members = mesh.data_group_of(group.topology.rank)

    def split(name: str, within: list[int]) -> NativeCommunicator | None:
        # Unique per set of ranks: a process may have several meshes, one after the other.
        return group.native_part(f"{name} in data of {mesh}", [members[i] for i in within])

    def split_gpus(name: str, within: list[int]) -> NativeCommunicator | None:
        ranks = [members[i] for i in within]
        made = group.native_part(f"{name} in data of {mesh}, GPUs", ranks, gpus=[device])
        return made and made.with_buckets_of(GPU_BUCKET_BYTES)

    on_gpus = OnGpus(exact.on_gpu, split_gpus) if isinstance(exact, GpuCommunicator) else None

    def make_exchanges(within_hosts: bool) -> list[Exchange]:
        exchange = Exchange(
            data, within_hosts=within_hosts, split=split, exact=exact, on_gpus=on_gpus
        )
        if not within_hosts and not is_shared_out(data.hosts) and _any_is_shared_out(group, mesh):
            # Other groups wait for this one, which needs no parts.
            for create in (split, split_gpus) if on_gpus else (split,):
                create("host", [])
                create("carriers", [])
        return [exchange]

    return Compressor(policy, make_exchanges, [device], agree)


def _any_is_shared_out(group: Group, mesh: RankGrid) -> bool:
    hosts = group.native().hosts
    return any(is_shared_out([hosts[rank] for rank in ranks]) for ranks in mesh.data_groups)
