"""Decides whether two workers belong to one job, from what they say of themselves."""

from __future__ import annotations

from tfdist.cluster.auth.identity import Identity
from tfdist.errors import ClusterError


def disagreement(mine: Identity, theirs: Identity) -> ClusterError | None:
    """What keeps a process from joining rank 0.

    Args:
        mine: the hello of rank 0.
        theirs: the hello of the process that dialled.

    Returns:
        The error for both; None where they agree.
    """
    if mine.version != theirs.version:
        return _different("versions", mine, mine.version, theirs, theirs.version)
    if error := protocols_differ(mine, theirs):
        return error
    if mine.fingerprint != theirs.fingerprint or mine.cluster != theirs.cluster:
        return ClusterError(
            f"The workers hold different clusters: {_difference(mine, theirs)}. "
            f'Give all workers the same "cluster" in TF_CONFIG.'
        )
    if theirs.rank >= len(mine.cluster):
        return ClusterError(
            f"{theirs}: there is no such rank among {len(mine.cluster)} workers. "
            f"Correct the task's index."
        )
    return None


def protocols_differ(mine: Identity, theirs: Identity) -> ClusterError | None:
    """The error for two processes that cannot even prove to one another who they are."""
    if mine.protocol == theirs.protocol:
        return None
    return _different("protocols", mine, mine.protocol, theirs, theirs.protocol)


def duplicate(one: Identity, other: Identity) -> ClusterError:
    """The error for two processes that claim the same rank."""
    job, index, address = one.cluster[one.rank]
    return ClusterError(
        f"Two processes say that they are {job} {index} ({address}): process {one.pid} on "
        f"{one.host} and process {other.pid} on {other.host}. Give each process a task index of "
        f"its own, or end the one that is left over."
    )


def _different(
    what: str, mine: Identity, here: object, theirs: Identity, there: object
) -> ClusterError:
    return ClusterError(
        f"The workers run different {what} of tfdist: {here} at {mine}; {there} at {theirs}. "
        f"Install the same version of tfdist everywhere."
    )


def _difference(mine: Identity, theirs: Identity) -> str:
    """The first entry that differs, with both sides."""
    here = {(job, index): address for job, index, address in mine.cluster}
    there = {(job, index): address for job, index, address in theirs.cluster}
    for job, index in [*here, *there]:
        ours, others = here.get((job, index)), there.get((job, index))
        if ours != others:
            return f'"{job}"[{index}] is {_entry(ours)} at {mine}; {_entry(others)} at {theirs}'
    return f"the order of the entries at {mine} is not that at {theirs}"


def _entry(address: str | None) -> str:
    return "absent" if address is None else f'"{address}"'
