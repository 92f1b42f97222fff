"""The rendezvous server, run by host 0: collects the hosts and sends them the worker list."""

from __future__ import annotations

import errno
import selectors
import socket
from collections.abc import Mapping

from tfdist.cluster.auth.hmac_challenge import new_secret
from tfdist.cluster.net.dns import is_numeric
from tfdist.cluster.net.local_addresses import port_holder
from tfdist.errors import LaunchError
from tfdist.launch.console import say
from tfdist.launch.hosts.channel import Channel, ChannelError, Message
from tfdist.launch.hosts.host_info import HostInfo, rejection, unreachable, worker_addresses
from tfdist.launch.hosts.late_hosts import LateHosts
from tfdist.launch.hosts.listener import HostListener, send_last
from tfdist.launch.hosts.rendezvous import Deadline, Rendezvous, format_hosts


def serve(address: tuple[str, int], this_host: HostInfo, seconds: float, secret: str) -> Rendezvous:
    """Waits for the other hosts.

    Args:
        address: host and port to listen on.
        this_host: this host; if it is elastic, it goes on listening.
        seconds: how long to wait.
        secret: the job's secret, which every host must prove; "" if none was set, in which case a
            random one is sent to the hosts.

    Raises:
        LaunchError: a host is missing at the deadline, or the hosts do not fit together. The
            connected hosts are sent the same message.
    """
    listener = HostListener(_listen(*address), secret)
    try:
        with _Server(listener, this_host, secret) as server:
            try:
                return server.run(Deadline(seconds), f"{address[0]}:{address[1]}")
            except LaunchError as error:
                server.broadcast({"refuse": str(error)})
                server.close_hosts()
                raise
    except BaseException:
        listener.close()
        raise
    finally:
        if not this_host.elastic:
            listener.close()


class _Server:
    """The connections on host 0 of authenticated hosts, and the listener to more."""

    def __init__(self, listener: HostListener, this_host: HostInfo, secret: str) -> None:
        self._this_host = this_host
        self._secret = secret
        self._listener = listener
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        self._hosts: dict[int, tuple[HostInfo, Channel]] = {}

    def __enter__(self) -> _Server:
        return self

    def __exit__(self, *error: object) -> None:
        self._selector.close()

    def run(self, deadline: Deadline, address: str) -> Rendezvous:
        while missing := self._missing():
            if deadline.report_due():
                deadline.report(format_hosts(missing))
                self.broadcast({"waiting": missing})
            if not deadline.left:
                raise LaunchError(
                    f"{format_hosts(missing)} did not connect to {address} within "
                    f"{deadline.seconds:.0f} s: start this command there with --node-rank "
                    f"{missing[0]}, or raise TFDIST_START_TIMEOUT"
                )
            for key, _ in self._selector.select(min(1.0, deadline.next_check)):
                if key.fileobj is not self._listener:
                    self._notice(key.data)
            for host, channel in self._listener.newcomers():
                self._admit(channel, host)
        return self._start()

    def broadcast(self, message: Message) -> None:
        for _, channel in self._hosts.values():
            try:
                channel.send(message)
            except ChannelError:
                pass  # `_receive` will notice that it is closed.

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
        if problem:
            send_last(channel, {"refuse": problem})
            channel.close()
            raise LaunchError(problem)
        self._hosts[host.number] = (host, channel)
        self._selector.register(channel, selectors.EVENT_READ, host.number)

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
        addresses = worker_addresses(layout)
        secret = self._secret or new_secret()
        sent_secret = "" if self._secret else secret
        first = len(ports[0])
        for number in range(1, self._this_host.num_hosts):
            try:
                start = {"workers": addresses, "first": first, "secret": sent_secret}
                self._hosts[number][1].send({"start": start})
            except ChannelError as error:
                raise LaunchError(
                    f"host {number} left just before the start: it {error}"
                ) from error
            first += len(ports[number])
        channels = {number: channel for number, (_, channel) in self._hosts.items()}
        late = None
        if self._this_host.elastic:
            late = LateHosts(self._listener, self._this_host, layout, sent_secret)
        return Rendezvous(
            tuple(addresses), first=0, channels=channels, secret=secret, late_hosts=late
        )

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
