"""The description of a cluster: all workers in rank order, and the rank of this process."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tfdist.errors import ClusterError

_REMEDY = 'Write it as "host:port", for example "10.0.0.7:2222" or "[fd00::7]:2222".'


def shown(value: object, limit: int = 200) -> str:
    """Returns the repr of a value for an error message, truncated to `limit` characters."""
    text = repr(value)
    return text if len(text) <= limit else f"{text[:limit]}…"


def split(address: object, where: str = "the address") -> tuple[str, int]:
    """Splits an address into host and port.

    Args:
        address: `"host:port"`, with an IPv6 host in brackets.
        where: the text that names the address in the error message.

    Returns:
        The host without brackets, and the port.

    Raises:
        ClusterError: `address` is not a valid `"host:port"`.

    Example:
        >>> split("[::1]:2222")
        ('::1', 2222)
    """

    def wrong(problem: str) -> ClusterError:
        return ClusterError(f"{where} {problem}. Received: {shown(address)}. {_REMEDY}")

    if not isinstance(address, str):
        raise wrong("must be a string")
    if address != "".join(address.split()) or not address.isprintable():
        raise wrong("must not contain whitespace")
    if "/" in address:
        raise wrong("must not contain a scheme or a path")
    host, colon, port = address.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    if not colon or (address.startswith("[") and not bracketed):
        raise wrong("has no port")
    if ":" in host and not bracketed:
        raise wrong("is ambiguous: an IPv6 host must be in brackets")
    host = host[1:-1] if bracketed else host
    if not host:
        raise wrong("has no host")
    if not (port.isascii() and port.isdecimal()):
        raise wrong("has no port" if not port else "has a port that is not a number")
    if not 1 <= int(port) <= 65535:
        raise wrong("has a port outside 1 to 65535")
    return host, int(port)


@dataclass(frozen=True)
class Worker:
    """One process of the group.

    Attributes:
        task_type: the worker's job in TF_CONFIG, `"chief"` or `"worker"`.
        task_index: the worker's index within that job.
        address: the `"host:port"` at which the worker listens; "" if the address is not known yet.
    """

    task_type: str
    task_index: int
    address: str

    def __str__(self) -> str:
        name = f"{self.task_type} {self.task_index}"
        return f"{name} ({self.address})" if self.address else name


@dataclass(frozen=True)
class Topology:
    """The workers of the group in rank order, and this process's rank.

    Attributes:
        workers: all processes of the group; the chief is rank 0. This is empty if there is no
            cluster, or if this process is an evaluator. An evaluator is not part of the group.
        rank: this process's position in `workers`.
        task_type: this process's job, possibly `"evaluator"`; None without a cluster.
        task_index: this process's index within that job; None without a cluster.
        generation: the number of times that the group has formed again without a restart of its
            processes.

    Example:
        >>> alone = Topology()
        >>> alone.size, alone.is_chief
        (1, True)
    """

    workers: tuple[Worker, ...] = ()
    rank: int = 0
    task_type: str | None = None
    task_index: int | None = None
    generation: int = 0

    @property
    def size(self) -> int:
        """The number of processes in the group, at least 1."""
        return max(1, len(self.workers))

    @property
    def is_chief(self) -> bool:
        """Whether this process writes files and prints on behalf of the group."""
        return self.rank == 0

    @property
    def me(self) -> Worker:
        """The entry of this process in `workers`; raises IndexError without a cluster."""
        return self.workers[self.rank]

    @property
    def chief(self) -> Worker:
        """The entry of rank 0 in `workers`; raises IndexError without a cluster."""
        return self.workers[0]

    @property
    def jobs(self) -> dict[str, list[str]]:
        """The addresses of the workers by job, as in TF_CONFIG; empty without a cluster."""
        jobs: dict[str, list[str]] = {}
        for worker in self.workers:
            jobs.setdefault(worker.task_type, []).append(worker.address)
        return jobs

    def fingerprint(self) -> str:
        """Returns a digest of `workers` and `generation`, so that processes can compare them."""
        text = ";".join(f"{w.task_type}:{w.task_index}={w.address}" for w in self.workers)
        if self.generation:
            text += f";generation={self.generation}"
        return hashlib.sha256(text.encode()).hexdigest()


_JOBS = ("chief", "worker", "evaluator")
_NO_SERVERS = "this strategy has no parameter servers ('ps'): every worker holds the model"


@dataclass(frozen=True)
class Source:
    """The texts that tell the user in which place of the configuration an error is.

    Attributes:
        cluster: the place of the jobs and addresses, for example `TF_CONFIG["cluster"]`.
        task_type: the place of this process's job, for example `TF_CONFIG["task"]["type"]`.
        task_index: the place of this process's index, for example `TF_CONFIG["task"]["index"]`.
    """

    cluster: str
    task_type: str
    task_index: str


def topology(jobs: Mapping[Any, Any], task_type: object, index: object, at: Source) -> Topology:
    """Validates a cluster description and puts the workers in rank order.

    Args:
        jobs: maps each job to the addresses of its processes. The addresses are a list, or a dict
            that maps an index to an address.
        task_type: this process's job.
        index: this process's index in that job, as an integer or as a string of digits.
        at: the places of `jobs`, `task_type` and `index` in the configuration, for error messages.

    Returns:
        The topology. The workers are in rank order, and the chief is the first one. If this process
        is an evaluator, the topology has no workers.

    Raises:
        ClusterError: the description is invalid. The message names the place of the error and
            explains how to fix it.

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
            f"Set it to this process's job in {at.cluster}."
        )
    addresses = _addresses(jobs, at)
    job = str(task_type)
    position = _index(index, job, addresses, at)
    if job == "evaluator":
        return Topology(task_type=job, task_index=position)
    workers = tuple(
        Worker(name, number, address)
        for name in ("chief", "worker")
        for number, address in enumerate(addresses.get(name, ()))
    )
    rank = position + (len(addresses.get("chief", ())) if job == "worker" else 0)
    return Topology(workers, rank, job, position)


def _listed() -> str:
    return ", ".join(f'"{job}"' for job in _JOBS)


def _addresses(jobs: Mapping[Any, Any], at: Source) -> dict[str, list[str]]:
    """Validates the addresses of all jobs; returns the addresses of each job in index order."""
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
                f"{at.cluster} has an unknown job; known jobs are {_listed()}. "
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
                    f"Received: {shown(address)}. Give each process its own address."
                )
    if len(addresses.get("chief", ())) > 1:
        raise ClusterError(
            f'{at.cluster}["chief"] must name one process. Received: {shown(addresses["chief"])}. '
            f'Move all but the first to "worker".'
        )
    return addresses


def _entries(entries: object, where: str) -> list[str]:
    """Converts the addresses of one job to a list in index order."""
    if isinstance(entries, Mapping):
        numbered = {_number(key): address for key, address in entries.items()}
        if len(numbered) != len(entries) or set(numbered) != set(range(len(entries))):
            raise ClusterError(
                f"{where} must number its processes 0, 1, 2, … without gaps. "
                f"Received: {shown(list(entries))}. Renumber them, or use a list."
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
            f"List the processes of this job, or remove the job."
        )
    return list(entries)


def _index(index: object, job: str, addresses: Mapping[str, list[str]], at: Source) -> int:
    number = _number(index)
    if number is None:
        raise ClusterError(
            f"{at.task_index} must be an integer >= 0. Received: {shown(index)}. "
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
            f"{at.cluster}[{job!r}]. Received: {number}. Correct it, or add this process."
        )
    return number


def _number(value: object) -> int | None:
    """Converts a non-negative integer or a string of digits to an index; returns None otherwise."""
    if isinstance(value, str) and value.isascii() and value.isdecimal():
        return int(value)
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    return None


def port_of(first: int, addresses: Sequence[str], rank: int) -> int:
    """Returns the port of a worker, so that the workers of a host use different ports.

    The first worker of each host uses the port `first`, the second one uses `first + 1`, and so on.

    Args:
        first: the port that the user has set, the same on all workers.
        addresses: the `"host:port"` of every worker in rank order; empty for a single process.
        rank: the rank of the worker.

    Example:
        >>> addresses = ["a:4000", "a:4001", "b:4000", "b:4001"]
        >>> [port_of(9400, addresses, rank) for rank in range(4)]
        [9400, 9401, 9400, 9401]
    """
    hosts = [split(address)[0] for address in addresses]
    return first + hosts[:rank].count(hosts[rank]) if hosts else first
