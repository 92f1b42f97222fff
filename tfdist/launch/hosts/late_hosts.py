"""Launchers that come again while an elastic job runs, as host 0 admits them."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from tfdist.launch.hosts.channel import Channel
from tfdist.launch.hosts.host_info import HostInfo, rejection, unreachable, worker_addresses
from tfdist.launch.hosts.listener import HostListener, send_last

# Host number -> its address and the ports of its workers.
Layout = Mapping[int, tuple[str, tuple[int, ...]]]


class LateHosts:
    """Admits the launchers of hosts that were lost.

    Args:
        listener: the listener.
        this_host: host 0.
        layout: where the workers of all hosts are.
        secret: what is sent to them; "" if the user has set the secret on all hosts.
    """

    def __init__(
        self, listener: HostListener, this_host: HostInfo, layout: Layout, secret: str
    ) -> None:
        self._listener = listener
        self._this_host = this_host
        self._layout = dict(layout)
        self._secret = secret

    def fileno(self) -> int:
        """The descriptor to wait on before `admit`."""
        return self._listener.fileno()

    @property
    def addresses(self) -> tuple[str, ...]:
        """`"host:port"` of every worker, in rank order; those that have come again included."""
        return tuple(worker_addresses(self._layout))

    def admit(
        self, connected: Collection[int], *, over: bool
    ) -> tuple[dict[int, Channel], list[str]]:
        """Handles what has arrived, without waiting.

        Args:
            connected: the hosts that are connected now.
            over: whether the job is ending, so that nobody can join.

        Returns:
            The connections of the hosts that are admitted, and why others are not.
        """
        admitted: dict[int, Channel] = {}
        refusals = []
        for host, channel in self._listener.newcomers():
            peers = {number: self._layout[number][0] for number in {*connected, *admitted}}
            layout = {**self._layout, host.number: (host.address or channel.peer, host.ports)}
            problem = late_rejection(host, channel.peer, self._this_host, peers, self._layout)
            problem = problem or unreachable({number: at for number, (at, _) in layout.items()})
            if over:
                problem = f"host {host.number} ({channel.peer}) is late: the job is ending"
            if problem:
                send_last(channel, {"refuse": problem})
                channel.close()
                refusals.append(problem)
                continue
            self._layout = layout
            first = sum(len(ports) for n, (_, ports) in layout.items() if n < host.number)
            start = {"first": first, "secret": self._secret, "running": True}
            send_last(channel, {"start": {"workers": self.addresses, **start}})
            admitted[host.number] = channel
        return admitted, refusals

    def close(self) -> None:
        """Stops listening."""
        self._listener.close()


def late_rejection(
    newcomer: HostInfo,
    source: str,
    this_host: HostInfo,
    connected: Mapping[int, str],
    layout: Layout,
) -> str:
    """Why a launcher that comes while the job runs cannot take part; "" if it can.

    Args:
        newcomer: its host.
        source: the address that it connects from.
        this_host: host 0.
        connected: host number -> address of the hosts that are connected now.
        layout: where the workers of all hosts were so far.

    Example:
        >>> a, b = (HostInfo(n, 2, "", (4000,), elastic=True) for n in (0, 1))
        >>> late_rejection(b, "10.0.0.2", a, {}, {0: ("10.0.0.1", (1,)), 1: ("10.0.0.2", (2, 3))})
        'host 1 (10.0.0.2) comes again with 1 worker, but had 2: pass the same -n'
    """
    problem = rejection(newcomer, source, this_host, {0: "host 0 itself", **connected})
    if problem:
        return problem
    count, before = len(newcomer.ports), len(layout[newcomer.number][1])
    if count != before:
        workers = f"{count} worker{'' if count == 1 else 's'}"
        name = f"host {newcomer.number} ({source})"
        return f"{name} comes again with {workers}, but had {before}: pass the same -n"
    return ""
