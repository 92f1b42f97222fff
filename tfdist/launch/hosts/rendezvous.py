"""How the launchers of several machines find one another: what they agree on."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from tfdist.launch.console import say
from tfdist.launch.hosts.channel import Channel

_REPORT_SECONDS = 5.0


@dataclass(frozen=True)
class Rendezvous:
    """The nodes of a job once all are there.

    Attributes:
        addresses: `"host:port"` of every worker of the job, in rank order.
        first: the rank of this node's first worker.
        links: open connections by node rank: on node 0 to every other node, on the others to
            node 0.
        secret: what all workers of the job have to know.
    """

    addresses: tuple[str, ...]
    first: int
    links: dict[int, Channel] = field(default_factory=dict)
    secret: str = field(default="", repr=False)


class Deadline:
    """A deadline, and when to say next what is being waited for.

    Args:
        seconds: until the deadline.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._end = time.monotonic() + seconds
        self._next_report = time.monotonic() + min(_REPORT_SECONDS, seconds / 2)

    @property
    def left(self) -> float:
        """Seconds to the deadline, 0 when it has passed."""
        return max(0.0, self._end - time.monotonic())

    @property
    def nap(self) -> float:
        """Seconds to wait at most before asking again."""
        return max(0.0, min(self.left, self._next_report - time.monotonic()))

    def report_due(self) -> bool:
        """Whether it is time to say what is awaited; true once for each report."""
        if time.monotonic() < self._next_report:
            return False
        self._next_report = time.monotonic() + _REPORT_SECONDS
        return True

    def say_waiting(self, what: str) -> None:
        """Says what is awaited, and how long still."""
        say(f"waiting for {what} ({self.left:.0f} s left)")


def names(nodes: list[int]) -> str:
    """`"node 2"`, or `"nodes 2, 3"`.

    Example:
        >>> names([2, 3])
        'nodes 2, 3'
    """
    return f"node{'s' if len(nodes) > 1 else ''} {', '.join(map(str, nodes))}"
