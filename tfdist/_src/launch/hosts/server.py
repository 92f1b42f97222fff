"""The rendezvous server, run by host 0: collects the hosts and sends them the worker list."""

from __future__ import annotations

import errno
import selectors
import socket
from collections.abc import Mapping
from dataclasses import asdict

from tfdist._src.cluster.auth.handshake import is_closed, new_secret
from tfdist._src.cluster.cluster_spec import Topology, Worker
from tfdist._src.cluster.net.dns import NameChecks, is_numeric
from tfdist._src.cluster.net.listener import port_holder
from tfdist._src.cluster.net.tls import Tls
from tfdist._src.launch.console import say
from tfdist._src.launch.hosts.host_info import HostInfo, rejection, unreachable, worker_addresses
from tfdist._src.launch.hosts.late_hosts import LateHosts
from tfdist._src.launch.hosts.messages import Channel, ChannelError, Start
from tfdist._src.launch.hosts.newcomers import Newcomers
from tfdist._src.launch.hosts.rendezvous import Deadline, Rendezvous, format_hosts
from tfdist._src.options import Options
from tfdist.errors import LaunchError


def serve(address: tuple[str, int], this_host: HostInfo, options: Options) -> Rendezvous:
    """Waits for the other hosts.

    Args:
        address: host and port to listen on.
        this_host: this host; if it is elastic, it goes on listening.
        options: `start_timeout` is how long to wait; `secret` and the TLS options authenticate both
            ends. Without a secret, a random one is sent to the hosts.

    Raises:
        LaunchError: a host is missing at the deadline, or the hosts do not fit together. The
            connected hosts are sent the same message.
        TlsError: the certificates are unusable.
    """
    tls = Tls.load(options)
    (at,) = worker_addresses({0: (address[0], (address[1],))})
    closed = is_closed(Topology((Worker("launcher", 0, at),)), options)
    newcomers = Newcomers(_listen(*address), this_host.num_hosts, options.secret, tls)
    try:
        with _Server(newcomers, this_host, options, closed) as server:
            try:
                return server.run(Deadline(options.start_timeout), at)
            except LaunchError as error:
                server.broadcast("refuse", str(error))
                server.close_hosts()
                raise
    except BaseException:
        newcomers.close()
        raise
    finally:
        if not this_host.elastic:
            newcomers.close()


class _Server:
    """The connections on host 0 of authenticated hosts, and the listener to more.

    Args:
        newcomers: the listener.
        this_host: this host.
        options: `secret` and whether TLS is used.
        closed: whether only launchers of the job can authenticate; only these end it.
    """

    def __init__(
        self, newcomers: Newcomers, this_host: HostInfo, options: Options, closed: bool
    ) -> None:
        self._this_host = this_host
        self._options = options
        self._closed = closed
        self._newcomers = newcomers
        self._selector = selectors.DefaultSelector()
        self._selector.register(newcomers, selectors.EVENT_READ)
        self._hosts: dict[int, tuple[HostInfo, Channel]] = {}
        self._refused = ""

    def __enter__(self) -> _Server:
        return self

    def __exit__(self, *error: object) -> None:
        self._selector.close()

    def run(self, deadline: Deadline, address: str) -> Rendezvous:
        names = NameChecks()
        names.begin([address])  # The other hosts dial it; what they see is not known here.
        while missing := self._missing():
            if deadline.report_due():
                problem = names.problem([address])
                deadline.report(format_hosts(missing) + (f"; {problem}" if problem else ""))
                self.broadcast("waiting", missing)
                names.begin([address])
            if not deadline.left:
                refused = f". Refused meanwhile: {self._refused}" if self._refused else ""
                raise LaunchError(
                    f"{format_hosts(missing)} did not connect to {address} within "
                    f"{deadline.seconds:.0f} s: start this command there with --node-rank "
                    f"{missing[0]}, or raise TFDIST_START_TIMEOUT{refused}"
                )
            for key, _ in self._selector.select(min(1.0, deadline.next_check)):
                if key.fileobj is not self._newcomers:
                    self._notice(key.data)
            for host, channel in self._newcomers.take():
                self._admit(channel, host)
        return self._start()

    def broadcast(self, kind: str, value: object) -> None:
        for _, channel in self._hosts.values():
            channel.send(kind, value)

    def close_hosts(self) -> None:
        for _, channel in self._hosts.values():
            channel.close()

    def _missing(self) -> list[int]:
        return [host for host in range(1, self._this_host.num_hosts) if host not in self._hosts]

    def _notice(self, number: int) -> None:
        """Reads from a host that has nothing to say before the start."""
        channel = self._hosts[number][1]
        try:
            channel.receive()
        except ChannelError as error:
            self._selector.unregister(channel)
            channel.close()
            del self._hosts[number]
            say(f"host {number} ({channel.peer}) left before the start: it {error}")

    def _admit(self, channel: Channel, host: HostInfo) -> None:
        """Adds an authenticated host."""
        connected = {number: other.peer for number, (_, other) in self._hosts.items()}
        problem = rejection(host, channel.peer, self._this_host, {0: "host 0 itself", **connected})
        if not problem:
            self._hosts[host.number] = (host, channel)
            self._selector.register(channel, selectors.EVENT_READ, host.number)
        elif self._closed:
            channel.send("refuse", problem)
            channel.close()
            raise LaunchError(problem)
        else:  # It may be a stranger.
            self._refused = problem
            self._newcomers.refuse(channel, problem)

    def _start(self) -> Rendezvous:
        hosts = {
            number: host.address or channel.peer for number, (host, channel) in self._hosts.items()
        }
        hosts[0] = self._this_host.address or self._own_address()
        if problem := unreachable(hosts):
            raise LaunchError(problem)
        ports: Mapping[int, tuple[int, ...]] = {
            0: self._this_host.ports,
            **{number: host.ports for number, (host, _) in self._hosts.items()},
        }
        layout = {number: (hosts[number], ports[number]) for number in hosts}
        addresses = tuple(worker_addresses(layout))
        secret = self._options.secret or new_secret()
        sent_secret = "" if self._options.secret else secret
        first = len(ports[0])
        for number in range(1, self._this_host.num_hosts):
            start = Start(addresses, first, sent_secret)
            self._hosts[number][1].send("start", asdict(start))
            first += len(ports[number])
        channels = {number: channel for number, (_, channel) in self._hosts.items()}
        late = None
        if self._this_host.elastic:
            proven = bool(self._options.secret) or self._options.tls
            sources = None if proven else {n: channel.peer for n, channel in channels.items()}
            late = LateHosts(self._newcomers, self._this_host, layout, sent_secret, sources)
        return Rendezvous(addresses, first=0, channels=channels, secret=secret, late_hosts=late)

    def _own_address(self) -> str:
        """The address at which other hosts have reached this one, preferably not loopback."""
        reached = [channel.local for _, (_, channel) in sorted(self._hosts.items())]
        return next((address for address in reached if not address.startswith("127.")), reached[0])


def _listen(host: str, port: int) -> socket.socket:
    """Listens on an IP address of this host; for a name, on all of its addresses.

    A host may resolve its own name to loopback, where other hosts cannot reach it.
    """
    exact = "127.0.0.1" if host == "localhost" else host
    try:
        if is_numeric(exact):
            try:
                family = socket.AF_INET6 if ":" in exact else socket.AF_INET
                return socket.create_server((exact, port), family=family)
            except OSError as error:
                if error.errno != errno.EADDRNOTAVAIL:
                    raise
        if socket.has_dualstack_ipv6():
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
        return socket.create_server(("", port))
    except OSError as error:
        holder = f" (in use by {port_holder(port)})" if port_holder(port) else ""
        raise LaunchError(
            f"host 0 cannot listen on port {port}{holder}: {error.strerror or error}. "
            f"Choose another --rendezvous port, and start only one host with --node-rank 0."
        ) from error
