"""What each worker of this machine is started with, as data: its command and environment."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class WorkerPlan:
    """One worker to start.

    Attributes:
        rank: its rank in the whole job.
        command: the program and its arguments.
        settings: what is added to the environment that it inherits.
    """

    rank: int
    command: tuple[str, ...]
    settings: Mapping[str, str]

    def __str__(self) -> str:
        """The plan as a line that a shell can run."""
        settings = [f"{name}={shlex.quote(value)}" for name, value in self.settings.items()]
        return " ".join([*settings, shlex.join(self.command)])


def plan_workers(
    *,
    addresses: Sequence[str],
    first: int,
    command: Sequence[str],
    shared: Mapping[str, str],
    own: Sequence[Mapping[str, str]],
) -> tuple[WorkerPlan, ...]:
    """Plans the workers of one machine.

    Args:
        addresses: `"host:port"` of every worker of the job, in rank order.
        first: the rank of this machine's first worker.
        command: what each worker runs.
        shared: settings that all workers of this machine get.
        own: for each worker of this machine, the settings that it alone gets.

    Returns:
        One plan for each entry of `own`.

    Example:
        >>> plan, = plan_workers(addresses=["127.0.0.1:4000"], first=0,
        ...                      command=["python", "train.py"], shared={}, own=[{}])
        >>> plan.settings["TF_CONFIG"]
        '{"cluster": {"worker": ["127.0.0.1:4000"]}, "task": {"type": "worker", "index": 0}}'
    """
    return tuple(
        WorkerPlan(
            rank=rank,
            command=tuple(command),
            settings={"TF_CONFIG": _tf_config(addresses, rank), **shared, **settings},
        )
        for rank, settings in enumerate(own, start=first)
    )


def _tf_config(addresses: Sequence[str], rank: int) -> str:
    return json.dumps(
        {"cluster": {"worker": list(addresses)}, "task": {"type": "worker", "index": rank}}
    )
