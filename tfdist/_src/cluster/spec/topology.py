"""The cluster as tfdist sees it: its workers in rank order, and this process's rank."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass


@dataclass(frozen=True)
class Worker:
    """One process of the group.

    Attributes:
        task_type: its job in TF_CONFIG, `"chief"` or `"worker"`.
        task_index: its index within that job.
        address: the `"host:port"` at which it listens; "" if that is yet unknown.
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
        workers: all processes of the group; the chief is rank 0. Empty for a single process
            (without a cluster, or an evaluator, which is not part of the group).
        rank: this process's position in `workers`.
        task_type: this process's job, possibly `"evaluator"`; None without a cluster.
        task_index: its index within that job; None without a cluster.
        generation: how often the group has formed anew in the same processes.

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
        """This process; requires a cluster."""
        return self.workers[self.rank]

    @property
    def chief(self) -> Worker:
        """Rank 0; requires a cluster."""
        return self.workers[0]

    @property
    def jobs(self) -> dict[str, list[str]]:
        """The addresses by job, in TensorFlow's format; empty without a cluster."""
        jobs: dict[str, list[str]] = {}
        for worker in self.workers:
            jobs.setdefault(worker.task_type, []).append(worker.address)
        return jobs

    def fingerprint(self) -> str:
        """A digest that two processes share exactly if cluster and generation are the same."""
        text = ";".join(f"{w.task_type}:{w.task_index}={w.address}" for w in self.workers)
        if self.generation:
            text += f";generation={self.generation}"
        return hashlib.sha256(text.encode()).hexdigest()
