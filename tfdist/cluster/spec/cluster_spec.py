"""Turns a cluster's jobs and this process's task into a Topology, whoever described them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tfdist.cluster.spec.host_port import shown, split
from tfdist.cluster.spec.topology import Topology, Worker
from tfdist.errors import ClusterError

_JOBS = ("chief", "worker", "evaluator")
_NO_SERVERS = "parameter servers ('ps') take no part in this strategy: every worker holds the model"


@dataclass(frozen=True)
class Source:
    """What the parts of a description are called where the user wrote them.

    Attributes:
        cluster: the jobs, for example `TF_CONFIG["cluster"]`.
        task_type: this process's job.
        task_index: its index.
    """

    cluster: str
    task_type: str
    task_index: str


def topology(jobs: Mapping[Any, Any], task_type: object, index: object, at: Source) -> Topology:
    """Checks a description of the cluster and puts it in rank order.

    Args:
        jobs: job name to its addresses, a list or a dict of index to address.
        task_type: this process's job.
        index: its index in that job, an integer or its digits.
        at: how error messages call the three.

    Returns:
        The workers in rank order, the chief first; without workers for an evaluator.

    Raises:
        ClusterError: the description is wrong; the message says where and what to do.

    Example:
        >>> at = Source("cluster", "type", "index")
        >>> topology({"worker": ["a:1", "b:1"]}, "worker", 1, at).rank
        1
    """
    if task_type == "ps":
        raise ClusterError(
            f"{at.task_type}: {_NO_SERVERS}. Received: 'ps'. Do not start this process, and "
            f'remove "ps" from {at.cluster}; or use tf.distribute.ParameterServerStrategy.'
        )
    if task_type not in _JOBS:
        raise ClusterError(
            f"{at.task_type} must be one of {_listed()}. Received: {shown(task_type)}. "
            f"Set it to the job that this process has in {at.cluster}."
        )
    addresses = _addresses(jobs, at)
    own = str(task_type)
    position = _index(index, own, addresses, at)
    if own == "evaluator":
        return Topology(task_type=own, task_index=position)
    workers = tuple(
        Worker(job, number, address)
        for job in ("chief", "worker")
        for number, address in enumerate(addresses.get(job, ()))
    )
    rank = position + (len(addresses.get("chief", ())) if own == "worker" else 0)
    return Topology(workers, rank, own, position)


def _listed() -> str:
    return ", ".join(f'"{job}"' for job in _JOBS)


def _addresses(jobs: Mapping[Any, Any], at: Source) -> dict[str, list[str]]:
    """The addresses of each job in order, every one checked."""
    addresses: dict[str, list[str]] = {}
    places: dict[tuple[str, int], str] = {}
    for job, entries in jobs.items():
        if job == "ps":
            raise ClusterError(
                f'{at.cluster}["ps"]: {_NO_SERVERS}. Received: {shown(entries)}. '
                f'Remove "ps" from the cluster of all workers.'
            )
        if job not in _JOBS:
            raise ClusterError(
                f"{at.cluster} has an unknown job; known are {_listed()}. "
                f"Received: {shown(job)}. Rename or remove it."
            )
        where = f'{at.cluster}["{job}"]'
        addresses[job] = _entries(entries, where)
        for number, address in enumerate(addresses[job]):
            host, port = split(address, f"{where}[{number}]")
            place = places.setdefault((host.lower(), port), f'"{job}"[{number}]')
            if place != f'"{job}"[{number}]':
                raise ClusterError(
                    f'{at.cluster} gives {place} and "{job}"[{number}] the same address. '
                    f"Received: {shown(address)}. Give each process an address of its own."
                )
    if len(addresses.get("chief", ())) > 1:
        raise ClusterError(
            f'{at.cluster}["chief"] must name one process. Received: {shown(addresses["chief"])}. '
            f'Move all but the first to "worker".'
        )
    return addresses


def _entries(entries: object, where: str) -> list[str]:
    """A job's addresses in order of index, from a list or from a dict of index to address."""
    if isinstance(entries, Mapping):
        numbered = {_number(key): address for key, address in entries.items()}
        if len(numbered) != len(entries) or set(numbered) != set(range(len(entries))):
            raise ClusterError(
                f"{where} must number its processes 0, 1, 2, … without a gap. "
                f"Received: {shown(list(entries))}. Renumber them, or give a list."
            )
        entries = [numbered[number] for number in range(len(numbered))]
    if not isinstance(entries, (list, tuple)):
        raise ClusterError(
            f'{where} must be a list of "host:port". Received: {shown(entries)}. '
            f"Put the addresses of this job in a list."
        )
    if not entries:
        raise ClusterError(
            f"{where} is empty. Received: {shown(entries)}. "
            f"Name the processes of this job, or remove the job."
        )
    return list(entries)


def _index(index: object, job: str, addresses: Mapping[str, list[str]], at: Source) -> int:
    number = _number(index)
    if number is None:
        raise ClusterError(
            f"{at.task_index} must be an integer of 0 or more. Received: {shown(index)}. "
            f"Set it to this process's position in {at.cluster}[{job!r}]."
        )
    if job == "evaluator" and job not in addresses:
        return number
    if job not in addresses:
        raise ClusterError(
            f"{at.task_type} names a job that {at.cluster} does not have. Received: {job!r}. "
            f"Set it to one of {sorted(addresses)}, or add the job to the cluster."
        )
    count = len(addresses[job])
    if number >= count:
        raise ClusterError(
            f"{at.task_index} must be below {count}, the number of processes in "
            f"{at.cluster}[{job!r}]. Received: {number}. Correct it, or add this process there."
        )
    return number


def _number(value: object) -> int | None:
    """The value as an index, from an integer of 0 or more or from its digits."""
    if isinstance(value, str) and value.isascii() and value.isdecimal():
        return int(value)
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    return None
