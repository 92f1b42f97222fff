"""The command and environment of each worker of this host, as data."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class WorkerPlan:
    """One worker to start.

    Attributes:
        rank: its rank in the job.
        command: the program and its arguments.
        settings: the variables added to the environment that it inherits.
    """

    rank: int
    command: tuple[str, ...]
    settings: Mapping[str, str]

    def __str__(self) -> str:
        """The plan as a shell command."""
        settings = [f"{name}={shlex.quote(value)}" for name, value in self.settings.items()]
        return " ".join([*settings, shlex.join(self.command)])


def plan_workers(
    *,
    addresses: Sequence[str],
    first: int,
    command: Sequence[str],
    shared: Mapping[str, str],
    per_worker: Sequence[Mapping[str, str]],
) -> tuple[WorkerPlan, ...]:
    """Plans the workers of one host.

    Args:
        addresses: `"host:port"` of every worker of the job, in rank order.
        first: the rank of this host's first worker.
        command: the command that each worker runs.
        shared: settings of all workers of this host.
        per_worker: additional settings of each worker of this host.

    Returns:
        One plan for each entry of `per_worker`.

    Example:
        >>> plan, = plan_workers(addresses=["127.0.0.1:4000"], first=0,
        ...                      command=["python", "train.py"], shared={}, per_worker=[{}])
        >>> plan.settings["TF_CONFIG"]
        '{"cluster": {"worker": ["127.0.0.1:4000"]}, "task": {"type": "worker", "index": 0}}'
    """
    return tuple(
        WorkerPlan(
            rank=rank,
            command=tuple(command),
            settings={"TF_CONFIG": _tf_config(addresses, rank), **shared, **settings},
        )
        for rank, settings in enumerate(per_worker, start=first)
    )


def _tf_config(addresses: Sequence[str], rank: int) -> str:
    return json.dumps(
        {"cluster": {"worker": list(addresses)}, "task": {"type": "worker", "index": rank}}
    )
