"""Host 0's listener: accepts launchers that have the job's secret, at the start and later."""

from __future__ import annotations

import selectors
import socket
import time
from collections.abc import Collection, Mapping
from dataclasses import asdict
from functools import partial

from tfdist._src.cluster.auth.handshake import VARIABLE
from tfdist._src.cluster.auth.identity import LAUNCH, Identity
from tfdist._src.cluster.net.framing import WireError
from tfdist._src.cluster.net.tls import Tls
from tfdist._src.cluster.rendezvous.acceptor import Acceptor
from tfdist._src.launch.console import announce
from tfdist._src.launch.hosts.messages import (
    Channel,
    ChannelError,
    HostInfo,
    Start,
    rejection,
    unreachable,
    worker_addresses,
)

_STRANGERS = 64
_HOST_SECONDS = 10.0


class Newcomers:
    """The listener, and the connections whose launchers have yet to describe their hosts.

    Args:
        listener: a listening socket, which it owns.
        num_hosts: the number of hosts of the job.
        secret: the job's secret, which every launcher must prove; "" if none was set.
        tls: the TLS contexts; None for connections without TLS.
    """

    def __init__(
        self, listener: socket.socket, num_hosts: int, secret: str, tls: Tls | None
    ) -> None:
        self._listener = listener
        self._selector = selectors.EpollSelector()
        self._silent: dict[Channel, tuple[Identity, float]] = {}
        self._room = num_hosts + _STRANGERS
        self._arrived: list[tuple[HostInfo, Channel]] = []
        self._acceptor = Acceptor(
            self._selector,
            Identity.of_other("host 0", LAUNCH),
            secret,
            tls,
            2 * num_hosts,
            screen,
            self._greet,
            announce,
            _STRANGERS,
        )
        listener.setblocking(False)
        accept = partial(self._acceptor.accept, listener)
        self._selector.register(listener, selectors.EVENT_READ, accept)

    def fileno(self) -> int:
        """The descriptor to wait on before `take`."""
        return self._selector.fileno()

    @property
    def is_busy(self) -> bool:
        """Whether `take` has to be called soon, even if nothing happens."""
        return bool(self._silent) or self._acceptor.is_busy

    def take(self) -> list[tuple[HostInfo, Channel]]:
        """Handles what has arrived, without waiting.

        Returns:
            The hosts whose launchers have authenticated since the last call; nothing else is
            checked of them.
        """
        for key, _ in self._selector.select(0):
            key.data()
        self._acceptor.tick()
        now = time.monotonic()
        for channel in [one for one, (_, deadline) in self._silent.items() if now >= deadline]:
            self._drop(channel, "it did not describe its host in time")
        arrived, self._arrived = self._arrived, []
        return arrived

    def refuse(self, channel: Channel, problem: str) -> None:
        """Tells a launcher that it cannot take part, and why."""
        channel.send("refuse", problem)
        channel.close()
        self._acceptor.reject(channel.peer, channel.port, WireError(f"not admitted: {problem}"))

    def close(self) -> None:
        """Stops listening, and closes the connections that have not been taken."""
        self._acceptor.close()
        self._listener.close()
        for channel in (*self._silent, *(channel for _, channel in self._arrived)):
            channel.close()
        self._selector.close()

    def _greet(self, sock: socket.socket, hello: Identity) -> None:
        """Waits for the description of an authenticated launcher's host."""
        if len(self._silent) >= self._room:  # without a secret, strangers can authenticate, too
            self._drop(next(iter(self._silent)), "too many launchers at once")
        try:
            channel = Channel(sock)
            self._selector.register(channel, selectors.EVENT_READ, partial(self._read, channel))
        except OSError:  # It has gone, or there is no room to watch it.
            sock.close()
            return
        self._silent[channel] = hello, time.monotonic() + _HOST_SECONDS

    def _read(self, channel: Channel) -> None:
        if channel not in self._silent:
            return
        hello, _ = self._silent[channel]
        try:
            for kind, value in channel.receive():
                if kind != "host" or channel not in self._silent:
                    raise ValueError("it sent something else than its host")
                host = HostInfo.received(value, hello)
                del self._silent[channel]
                self._selector.unregister(channel)
                self._arrived.append((host, channel))
        except ChannelError as error:
            self._drop(channel, f"it {error}")
        except ValueError as error:
            self._drop(channel, str(error))

    def _drop(self, channel: Channel, reason: str) -> None:
        if self._silent.pop(channel, None):
            self._selector.unregister(channel)
        else:
            self._arrived = [(host, one) for host, one in self._arrived if one is not channel]
        channel.close()
        self._acceptor.reject(channel.peer, channel.port, WireError(reason))


def screen(theirs: Identity) -> None:
    """Rejects what is no launcher; raises WireError."""
    if theirs.purpose != LAUNCH:
        raise WireError(f"{theirs} connected for {theirs.purpose!r} to a launcher")


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
