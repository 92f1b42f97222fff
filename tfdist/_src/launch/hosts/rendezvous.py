"""The outcome of the rendezvous of all hosts, and what its server and client share."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from tfdist._src.launch.console import say
from tfdist._src.launch.hosts.late_hosts import LateHosts
from tfdist._src.launch.hosts.messages import Channel

_REPORT_SECONDS = 5.0


@dataclass(frozen=True)
class Rendezvous:
    """What the hosts of a job agree on once all have connected.

    Attributes:
        addresses: `"host:port"` of every worker of the job, in rank order.
        first: the rank of this host's first worker.
        channels: open connections by host number: on host 0 to every other host, on the other
            hosts to host 0.
        secret: the job's secret, for all its workers.
        late_hosts: on host 0 of an elastic job, admits launchers that come again.
        running: whether the job runs already, and this launcher has come again.
    """

    addresses: tuple[str, ...]
    first: int
    channels: dict[int, Channel] = field(default_factory=dict)
    secret: str = field(default="", repr=False)
    late_hosts: LateHosts | None = None
    running: bool = False


class Deadline:
    """A deadline, with periodic reports of what is being waited for.

    Args:
        seconds: until the deadline.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._end = time.monotonic() + seconds
        self._next_report = time.monotonic() + min(_REPORT_SECONDS, seconds / 2)

    @property
    def left(self) -> float:
        """Seconds until the deadline, 0 once it has passed."""
        return max(0.0, self._end - time.monotonic())

    @property
    def next_check(self) -> float:
        """Seconds until the deadline or the next report, whichever is earlier."""
        return max(0.0, min(self.left, self._next_report - time.monotonic()))

    def report_due(self) -> bool:
        """Whether a report is due; true once per report."""
        if time.monotonic() < self._next_report:
            return False
        self._next_report = time.monotonic() + _REPORT_SECONDS
        return True

    def report(self, awaited: str) -> None:
        """Prints what is being waited for, and the time left."""
        say(f"waiting for {awaited} ({self.left:.0f} s left)")


def format_hosts(hosts: list[int]) -> str:
    """`"host 2"`, or `"hosts 2, 3"`.

    Example:
        >>> format_hosts([2, 3])
        'hosts 2, 3'
    """
    return f"host{'s' if len(hosts) > 1 else ''} {', '.join(map(str, hosts))}"
