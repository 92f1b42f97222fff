"""Admits the launchers of other hosts on host 0, and defines the messages between launchers."""

from __future__ import annotations

import contextlib
import re
import selectors
import socket
import time
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from ipaddress import ip_address
from typing import Any

from tfdist._src.cluster.auth.identity import LAUNCH, Identity
from tfdist._src.cluster.net.dns import is_numeric
from tfdist._src.cluster.net.framing import Decoder, WireError, encode
from tfdist._src.cluster.net.tls import Tls
from tfdist._src.cluster.rendezvous.acceptor import Acceptor, shown_ip
from tfdist._src.launch.console import warn
from tfdist._src.launch.job.failure import decode
from tfdist._version import __version__

_MAX_PORTS = 4096
_ADDRESS = re.compile(r"[A-Za-z0-9._:%-]{1,253}")


@dataclass(frozen=True)
class HostInfo:
    """One host of a job, as its launcher describes it.

    Attributes:
        number: the host's number (`--node-rank`).
        num_hosts: the number of hosts of the job, as passed to this host's launcher (`--nnodes`).
        address: the address at which other hosts reach the host's workers (`--host`); "" to use the
            address from which its launcher connects to host 0.
        ports: the ports of the host's workers.
        version: the host's version of tfdist.
        elastic: whether failed workers are replaced while the others continue (`--elastic`).
    """

    number: int
    num_hosts: int
    address: str
    ports: tuple[int, ...]
    version: str = __version__
    elastic: bool = False

    @classmethod
    def received(cls, value: object, hello: Identity) -> HostInfo:
        """Creates a `HostInfo` from the message in which a launcher describes its host.

        Args:
            value: the description, a result of `dataclasses.asdict`. It is ignored if the launcher
                has another version of tfdist, in which its fields may have another meaning.
            hello: the identity of the launcher, from the handshake.

        Raises:
            ValueError: `value` does not describe a valid host.
        """
        if hello.version != __version__:
            return cls(hello.rank, 0, "", (), version=hello.version)
        host = decode(cls, value)
        ports = 0 < len(host.ports) <= _MAX_PORTS and all(0 < p < 65536 for p in host.ports)
        address = not host.address or _ADDRESS.fullmatch(host.address)
        if not (ports and address and (host.number, host.version) == (hello.rank, __version__)):
            raise ValueError("it sent an invalid host")
        return host


def rejection(
    newcomer: HostInfo, source: str, this_host: HostInfo, connected: Mapping[int, str]
) -> str:
    """Returns why a host cannot be part of the job.

    Args:
        newcomer: the host.
        source: the address from which the host's launcher connects.
        this_host: host 0.
        connected: maps the number of each connected host, including host 0, to its address.

    Returns:
        The reason, in one line to show on all hosts; "" if the host can be part of the job.

    Example:
        >>> a, b = HostInfo(0, 2, "", (4000,)), HostInfo(1, 3, "", (4000,))
        >>> rejection(b, "10.0.0.2", a, {0: "10.0.0.1"})
        'host 1 (10.0.0.2) was started with --nnodes 3, host 0 with --nnodes 2: ...'
    """
    name = f"host {newcomer.number} ({source})"
    if newcomer.version != this_host.version:
        return (
            f"{name} has tfdist {newcomer.version}, host 0 has {this_host.version}: "
            f"install the same version on all hosts"
        )
    if newcomer.num_hosts != this_host.num_hosts:
        return (
            f"{name} was started with --nnodes {newcomer.num_hosts}, host 0 with "
            f"--nnodes {this_host.num_hosts}: pass the same --nnodes on all hosts"
        )
    if newcomer.elastic != this_host.elastic:
        one, other = (name, "host 0") if newcomer.elastic else ("host 0", name)
        return (
            f"{one} was started with --elastic, {other} without: pass it on all hosts, or on none"
        )
    if newcomer.number in connected:
        return (
            f"two hosts were started with --node-rank {newcomer.number}: "
            f"{connected[newcomer.number]} and {source}; pass a different --node-rank on each host"
        )
    if not 0 < newcomer.number < this_host.num_hosts:
        return f"{name} must have a --node-rank from 1 to {this_host.num_hosts - 1}"
    return ""


def unreachable(addresses: Mapping[int, str]) -> str:
    """Returns why workers could not reach other hosts at these addresses.

    Args:
        addresses: maps the number of each host to the address at which other hosts should reach it.

    Returns:
        The reason, in one line to show on all hosts; "" if no problem is known.
    """
    local = [host for host, address in addresses.items() if _is_loopback(address)]
    if len(local) in (0, len(addresses)):
        return ""
    return (
        f"host {local[0]} would be reached at {addresses[local[0]]}, which works only on that "
        f"host itself: pass it a --host address that the other hosts can reach"
    )


def worker_addresses(hosts: Mapping[int, tuple[str, tuple[int, ...]]]) -> list[str]:
    """Returns the address of every worker, in rank order.

    Args:
        hosts: maps the number of each host to its address and the ports of its workers.

    Example:
        >>> worker_addresses({1: ("fd00::2", (4000,)), 0: ("10.0.0.1", (4001, 4002))})
        ['10.0.0.1:4001', '10.0.0.1:4002', '[fd00::2]:4000']
    """
    return [
        f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
        for _, (address, ports) in sorted(hosts.items())
        for port in ports
    ]


def _is_loopback(address: str) -> bool:
    return address == "localhost" or (is_numeric(address) and ip_address(address).is_loopback)


Message = tuple[str, Any]
"""A kind, and a value that JSON can represent."""

_MAX_FRAME = 1 << 20
_READ_SIZE = 65536
_SEND_SECONDS = 5.0
# If a host vanishes without closing its connections, for example because of a power failure, the
# kernel closes them after about 15 + 3 * 5 seconds.
_KEEPALIVE = {"TCP_KEEPIDLE": 15, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 30000}


class ChannelError(Exception):
    """A connection has ended.

    The message is the rest of a sentence about the peer, such as "closed the connection".
    """


@dataclass(frozen=True)
class Start:
    """The message with which host 0 tells another host to start its workers.

    Attributes:
        workers: `"host:port"` of every worker of the job, in rank order.
        first: the rank of the first worker of the host that receives the message.
        secret: the job's secret; "" if the user has set the secret on all hosts.
        running: whether the job is already running, and the host rejoins it.
    """

    workers: tuple[str, ...]
    first: int
    secret: str = field(default="", repr=False)
    running: bool = False


class Channel:
    """Sends and receives messages over a connected socket; `close` closes the socket.

    Args:
        connection: the socket, after the handshake.

    Raises:
        OSError: the connection has ended.

    Attributes:
        peer: the IP address of the peer.
        port: the port of the peer.
        local: the IP address of this host in the connection.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._decoder = Decoder(_MAX_FRAME)
        connection.settimeout(_SEND_SECONDS)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEPALIVE.items():
            if hasattr(socket, name):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        peer = connection.getpeername()
        self.peer = shown_ip(peer)
        self.port: int = peer[1]
        self.local = shown_ip(connection.getsockname())

    def fileno(self) -> int:
        """Returns the file descriptor; when it is readable, call `receive`."""
        return self._socket.fileno()

    def send(self, kind: str, value: object = None) -> None:
        """Sends one message.

        If the peer is gone, or accepts no data for 5 seconds, this method ends the connection
        instead of raising an error. A later call of `receive` then raises `ChannelError`.
        """
        try:
            self._socket.sendall(encode({"kind": kind, "value": value}))
        except OSError:
            # Perhaps only a part of the message was sent. The peer could not decode a message that
            # follows, so end the connection.
            with contextlib.suppress(OSError):
                socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    def receive(self) -> list[Message]:
        """Reads the data that has arrived, without waiting.

        Returns:
            The messages that are complete now. The list is empty if there are none.

        Raises:
            ChannelError: the connection has ended, or the received data is not a message.
        """
        try:
            data = self._socket.recv(_READ_SIZE, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return []
        except OSError as error:
            raise ChannelError(f"lost the connection ({error})") from error
        if not data:
            raise ChannelError("closed the connection")
        try:
            return [(header["kind"], header.get("value")) for header, _ in self._decoder.feed(data)]
        except WireError as error:
            raise ChannelError(f"sent no messages: {error}") from error

    def close(self) -> None:
        """Closes the connection."""
        self._socket.close()


_STRANGERS = 64
_HOST_SECONDS = 10.0


class Newcomers:
    """Accepts connections of other launchers, and receives the descriptions of their hosts.

    Args:
        listener: a listening socket; `close` closes it.
        num_hosts: the number of hosts of the job.
        secret: the job's secret. Every launcher must prove that it knows the secret. "" if the user
            has not set a secret; then launchers need not prove this.
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
            warn,
            _STRANGERS,
        )
        listener.setblocking(False)
        accept = partial(self._acceptor.accept, listener)
        self._selector.register(listener, selectors.EVENT_READ, accept)

    def fileno(self) -> int:
        """Returns the file descriptor; when it is readable, call `take`."""
        return self._selector.fileno()

    @property
    def is_busy(self) -> bool:
        """Whether `take` must be called soon even if the descriptor does not become readable.

        This is the case while there are connections that `take` closes after a time limit.
        """
        return bool(self._silent) or self._acceptor.is_busy

    def take(self) -> list[tuple[HostInfo, Channel]]:
        """Handles new connections and received data, without waiting.

        Returns:
            The hosts that have been described since the last call, with their connections. Their
            launchers are authenticated. The caller must check everything else, for example with
            `rejection`.
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
        """Tells a launcher why it cannot join the job, and closes the connection."""
        channel.send("refuse", problem)
        channel.close()
        self._acceptor.reject(channel.peer, channel.port, WireError(f"not admitted: {problem}"))

    def close(self) -> None:
        """Stops listening, and closes the connections that `take` has not returned."""
        self._acceptor.close()
        self._listener.close()
        for channel in (*self._silent, *(channel for _, channel in self._arrived)):
            channel.close()
        self._selector.close()

    def _greet(self, sock: socket.socket, hello: Identity) -> None:
        """Begins to wait for the message in which an authenticated launcher describes its host."""
        if len(self._silent) >= self._room:  # Without a secret, any process can authenticate.
            self._drop(next(iter(self._silent)), "too many launchers at once")
        try:
            channel = Channel(sock)
            self._selector.register(channel, selectors.EVENT_READ, partial(self._read, channel))
        except OSError:  # The peer is gone, or the selector cannot register the socket.
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
                    raise ValueError("it sent another message instead of its host")
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
    """Raises WireError if an authenticated peer is not a launcher."""
    if theirs.purpose != LAUNCH:
        raise WireError(f"{theirs} connected for {theirs.purpose!r} to a launcher")


# Maps the number of each host to its address and the ports of its workers.
Layout = Mapping[int, tuple[str, tuple[int, ...]]]


class LateHosts:
    """Lets hosts rejoin the running job after host 0 has lost the connection to their launchers.

    Args:
        newcomers: accepts the connections of the launchers.
        this_host: host 0.
        layout: the addresses and ports of the workers of all hosts.
        secret: the secret to send to the launchers; "" if the user has set it on all hosts.
        sources: maps the number of each host to the only address from which it may rejoin. None if
            hosts may rejoin from any address, because a secret or TLS proves that their launchers
            belong to the job.
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
        """Returns the file descriptor; when it is readable, call `admit`."""
        return self._newcomers.fileno()

    @property
    def is_busy(self) -> bool:
        """Whether `admit` must be called soon even if the descriptor does not become readable."""
        return self._newcomers.is_busy

    @property
    def addresses(self) -> tuple[str, ...]:
        """`"host:port"` of every worker, in rank order, including rejoined hosts."""
        return tuple(worker_addresses(self._layout))

    def admit(self, connected: Collection[int], *, over: bool) -> dict[int, Channel]:
        """Handles new connections and received data, without waiting.

        Launchers that cannot join the job receive a message with the reason.

        Args:
            connected: the numbers of the hosts that are connected now.
            over: whether the job is ending. Then no host can join.

        Returns:
            The connections of the admitted hosts, by host number.
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
    """Returns why a launcher that connects during the job cannot join it; "" if it can.

    Args:
        newcomer: the launcher's host.
        source: the address from which the launcher connects.
        this_host: host 0.
        connected: maps the number of each host that is connected now to its address.
        layout: the addresses and ports of the workers of all hosts, before this launcher joins.
        sources: see `LateHosts`.

    Example:
        >>> a, b = (HostInfo(n, 2, "", (4000,), elastic=True) for n in (0, 1))
        >>> late_rejection(b, "10.0.0.2", a, {}, {0: ("10.0.0.1", (1,)), 1: ("10.0.0.2", (2, 3))})
        'host 1 (10.0.0.2) reconnects with 1 worker, but had 2: pass the same -n'
    """
    problem = rejection(newcomer, source, this_host, {0: "host 0 itself", **connected})
    if problem:
        return problem
    name = f"host {newcomer.number} ({source})"
    if sources is not None and source != sources[newcomer.number]:
        return (
            f"{name} was at {sources[newcomer.number]} before: to admit it from another address, "
            f"start the job with the same TFDIST_SECRET on all hosts"
        )
    count, before = len(newcomer.ports), len(layout[newcomer.number][1])
    if count != before:
        workers = f"{count} worker{'' if count == 1 else 's'}"
        return f"{name} reconnects with {workers}, but had {before}: pass the same -n"
    return ""
