"""Decides from two workers' identities whether they belong to the same job."""

from __future__ import annotations

from collections.abc import Sequence

from tfdist._src.cluster.auth.identity import Identity
from tfdist._src.cluster.spec.topology import Topology
from tfdist.errors import ClusterError

Entry = tuple[str, int, str]
"""A worker in a cluster: its job, its index in it, and its address."""


def disagreement(topology: Topology, mine: Identity, theirs: Identity) -> ClusterError | None:
    """Why two processes cannot belong to the same job.

    Args:
        topology: this process's cluster.
        mine: the identity of this process.
        theirs: the identity of the process that connected.

    Returns:
        The error for both to raise; None if they match.
    """
    if mine.version != theirs.version:
        return _different("versions", mine, mine.version, theirs, theirs.version)
    if error := protocols_differ(mine, theirs):
        return error
    if mine.fingerprint != theirs.fingerprint:
        return clusters_differ(f"those of {mine} and of {theirs}")
    if theirs.rank >= topology.size:
        return ClusterError(
            f"{theirs}: no such rank among {topology.size} workers. Correct the task index."
        )
    return None


def protocols_differ(mine: Identity, theirs: Identity) -> ClusterError | None:
    """The error for two processes whose protocols differ, so that they cannot authenticate."""
    if mine.protocol == theirs.protocol:
        return None
    return _different("protocols", mine, mine.protocol, theirs, theirs.protocol)


def duplicate(one: Identity, other: Identity) -> ClusterError:
    """The error for two processes that claim the same rank."""
    return ClusterError(
        f"Two processes claim to be {one.worker}: process {one.pid} on {one.host} and "
        f"process {other.pid} on {other.host}. Give each process its own task index, or stop the "
        f"stale process."
    )


def clusters_differ(difference: str) -> ClusterError:
    """The error for two processes with different clusters."""
    return ClusterError(
        f"The workers have different clusters: {difference}. "
        f'Give all workers the same "cluster" in TF_CONFIG.'
    )


def entries(topology: Topology) -> list[Entry]:
    """The workers of a cluster, in rank order; then its generation, where the group has changed."""
    workers = [(w.task_type, w.task_index, w.address) for w in topology.workers]
    generation = topology.generation
    return [*workers, ("generation", generation, "of the group")] if generation else workers


def first_difference(
    mine: Sequence[Entry], me: object, theirs: Sequence[Entry], them: object
) -> str:
    """Describes the first entry that differs between two clusters, with both values.

    Example:
        >>> first_difference([("worker", 0, "a:1")], "x", [("worker", 0, "b:1")], "y")
        '"worker"[0] is "a:1" at x; "b:1" at y'
    """
    here = {(job, index): address for job, index, address in mine}
    there = {(job, index): address for job, index, address in theirs}
    for job, index in [*here, *there]:
        ours, others = here.get((job, index)), there.get((job, index))
        if ours != others:
            return f'"{job}"[{index}] is {_entry(ours)} at {me}; {_entry(others)} at {them}'
    return f"the order of the entries at {me} differs from that at {them}"


def _different(
    what: str, mine: Identity, here: object, theirs: Identity, there: object
) -> ClusterError:
    return ClusterError(
        f"The workers run different {what} of tfdist: {here} at {mine}; {there} at {theirs}. "
        f"Install the same version of tfdist everywhere."
    )


def _entry(address: str | None) -> str:
    return "absent" if address is None else f'"{address}"'
