"""How long workers waited for one another over the recorded collectives and messages."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from tfdist._src.launch.flight.merge import Job


@dataclass(frozen=True)
class Total:
    """Seconds of waiting over the recorded collectives and messages of a worker.

    Attributes:
        worker: its name.
        waited_for: by all others together, in operations that this worker joined last.
        waited: by itself, for whichever worker joined last.
    """

    worker: str
    waited_for: float
    waited: float


def add_up(job: Job) -> tuple[Total, ...]:
    """Adds the waits up: each is from when a worker began until it noticed the last rank.

    Returns:
        The workers that waited or were waited for, the longest waited for first.
    """
    waited_for: dict[str, int] = defaultdict(int)
    waited: dict[str, int] = defaultdict(int)
    for group, member in ((g, m) for g in job.groups for m in g.members.values()):
        for record in member.communicator.records:
            nanoseconds = record.last_arrived_ns - record.begun_ns
            if record.last >= 0 and nanoseconds > 0:
                waited_for[group.ranks[group.last(member.communicator.rank, record)]] += nanoseconds
                waited[member.name] += nanoseconds
    totals = (Total(w, waited_for[w] / 1e9, waited[w] / 1e9) for w in {**waited_for, **waited})
    return tuple(sorted(totals, key=lambda total: (-total.waited_for, -total.waited)))
