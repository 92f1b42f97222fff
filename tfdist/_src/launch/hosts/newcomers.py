"""Host 0's listener: accepts launchers that have the job's secret, in the thread that calls it."""

from __future__ import annotations

import selectors
import socket
import time
from functools import partial

from tfdist._src.cluster.auth.identity import LAUNCH, Identity
from tfdist._src.cluster.net.framing import WireError
from tfdist._src.cluster.net.tls import Tls
from tfdist._src.cluster.rendezvous.acceptor import Acceptor
from tfdist._src.launch.console import announce
from tfdist._src.launch.hosts.host_info import HostInfo
from tfdist._src.launch.hosts.messages import Channel, ChannelError

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
