"""Launchers that come again while an elastic job runs, as host 0 admits them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict

from tfdist._src.cluster.auth.handshake import VARIABLE
from tfdist._src.launch.hosts.host_info import HostInfo, rejection, unreachable, worker_addresses
from tfdist._src.launch.hosts.messages import Channel, Start
from tfdist._src.launch.hosts.newcomers import Newcomers

# Host number -> its address and the ports of its workers.
Layout = Mapping[int, tuple[str, tuple[int, ...]]]


class LateHosts:
    """Admits the launchers of hosts that were lost.

    Args:
        newcomers: the listener.
        this_host: host 0.
        layout: where the workers of all hosts are.
        secret: what is sent to them; "" if the user has set the secret on all hosts.
        sources: the address from which each host may come again, by number; None if launchers have
            proven that they belong to the job, so that any address will do.
    """

    def __init__(
        self,
        newcomers: Newcomers,
        this_host: HostInfo,
        layout: Layout,
        secret: str,
        sources: Mapping[int, str] | None,
    ) -> None:
        self._newcomers = newcomers
        self._this_host = this_host
        self._layout = dict(layout)
        self._secret = secret
        self._sources = sources

    def fileno(self) -> int:
        """The descriptor to wait on before `admit`."""
        return self._newcomers.fileno()

    @property
    def is_busy(self) -> bool:
        """Whether `admit` has to be called soon, even if nothing happens."""
        return self._newcomers.is_busy

    @property
    def addresses(self) -> tuple[str, ...]:
        """`"host:port"` of every worker, in rank order; those that have come again included."""
        return tuple(worker_addresses(self._layout))

    def admit(self, connected: Collection[int], *, over: bool) -> dict[int, Channel]:
        """Handles what has arrived, without waiting.

        Args:
            connected: the hosts that are connected now.
            over: whether the job is ending, so that nobody can join.

        Returns:
            The connections of the hosts that are admitted; the others have been told why not.
        """
        admitted: dict[int, Channel] = {}
        for host, channel in self._newcomers.take():
            peers = {number: self._layout[number][0] for number in {*connected, *admitted}}
            layout = {**self._layout, host.number: (host.address or channel.peer, host.ports)}
            problem = late_rejection(
                host, channel.peer, self._this_host, peers, self._layout, self._sources
            )
            problem = problem or unreachable({number: at for number, (at, _) in layout.items()})
            if over:
                problem = f"host {host.number} ({channel.peer}) is late: the job is ending"
            if problem:
                self._newcomers.refuse(channel, problem)
                continue
            self._layout = layout
            first = sum(len(ports) for n, (_, ports) in layout.items() if n < host.number)
            start = Start(self.addresses, first, self._secret, running=True)
            channel.send("start", asdict(start))
            admitted[host.number] = channel
        return admitted

    def close(self) -> None:
        """Stops listening."""
        self._newcomers.close()


def late_rejection(
    newcomer: HostInfo,
    source: str,
    this_host: HostInfo,
    connected: Mapping[int, str],
    layout: Layout,
    sources: Mapping[int, str] | None = None,
) -> str:
    """Why a launcher that comes while the job runs cannot take part; "" if it can.

    Args:
        newcomer: its host.
        source: the address that it connects from.
        this_host: host 0.
        connected: host number -> address of the hosts that are connected now.
        layout: where the workers of all hosts were so far.
        sources: see `LateHosts`.

    Example:
        >>> a, b = (HostInfo(n, 2, "", (4000,), elastic=True) for n in (0, 1))
        >>> late_rejection(b, "10.0.0.2", a, {}, {0: ("10.0.0.1", (1,)), 1: ("10.0.0.2", (2, 3))})
        'host 1 (10.0.0.2) comes again with 1 worker, but had 2: pass the same -n'
    """
    problem = rejection(newcomer, source, this_host, {0: "host 0 itself", **connected})
    if problem:
        return problem
    name = f"host {newcomer.number} ({source})"
    if sources is not None and source != sources[newcomer.number]:
        return (
            f"{name} was at {sources[newcomer.number]} before: to admit it from another address, "
            f"start the job with the same {VARIABLE} on all hosts"
        )
    count, before = len(newcomer.ports), len(layout[newcomer.number][1])
    if count != before:
        workers = f"{count} worker{'' if count == 1 else 's'}"
        return f"{name} comes again with {workers}, but had {before}: pass the same -n"
    return ""
