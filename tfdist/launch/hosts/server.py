"""Node 0's part of the meeting: it waits for the others and tells them the list of workers."""

from __future__ import annotations

import errno
import selectors
import socket
import time
from collections.abc import Mapping

from tfdist.cluster.auth.hmac_challenge import new_secret
from tfdist.cluster.net.dns import is_numeric
from tfdist.cluster.net.local_addresses import port_holder
from tfdist.errors import LaunchError
from tfdist.launch.console import say
from tfdist.launch.hosts.auth import REMEDY, AuthServer
from tfdist.launch.hosts.channel import Channel, ChannelError, Message, StrangerError
from tfdist.launch.hosts.host_info import HostInfo, objection, unreachable, worker_addresses
from tfdist.launch.hosts.rendezvous import Deadline, Rendezvous, names

_HELLO_SECONDS = 10.0
_MOST_STRANGERS = 64


def gather(at: tuple[str, int], mine: HostInfo, seconds: float, secret: str) -> Rendezvous:
    """Waits for the other nodes.

    Args:
        at: host and port to listen at.
        mine: this node.
        seconds: how long to wait.
        secret: what was set for the job, and every node has to prove; "" where nothing was, and a
            random one is told to the nodes.

    Raises:
        LaunchError: a node is missing at the end, or the nodes do not fit together. The nodes
            that are there are told the same.
    """
    listener = _listen(*at)
    with listener, _Gathering(listener, mine, secret) as gathering:
        try:
            return gathering.run(Deadline(seconds), f"{at[0]}:{at[1]}")
        except LaunchError as error:
            gathering.tell_all({"refuse": str(error)})
            gathering.close_all()
            raise


class _Gathering:
    """The connections on node 0: those that have not said who they are, and the nodes."""

    def __init__(self, listener: socket.socket, mine: HostInfo, secret: str) -> None:
        self._mine = mine
        self._secret = secret
        self._listener = listener
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        self._unknown: dict[Channel, AuthServer] = {}
        self._nodes: dict[int, tuple[HostInfo, Channel]] = {}

    def __enter__(self) -> _Gathering:
        return self

    def __exit__(self, *error: object) -> None:
        for channel in self._unknown:
            channel.close()
        self._selector.close()

    def run(self, patience: Deadline, at: str) -> Rendezvous:
        while missing := self._missing():
            if patience.report_due():
                patience.say_waiting(names(missing))
                self.tell_all({"waiting": missing})
            if not patience.left:
                raise LaunchError(
                    f"{names(missing)} did not arrive at {at} within {patience.seconds:.0f} s: "
                    f"start this command there with --node-rank {missing[0]}, "
                    f"or raise TFDIST_START_TIMEOUT"
                )
            for key, _ in self._selector.select(min(1.0, patience.nap)):
                if key.fileobj is self._listener:
                    self._accept()
                else:
                    self._hear(key.data)
            self._drop_silent()
        return self._agree()

    def tell_all(self, message: Message) -> None:
        for _, channel in self._nodes.values():
            try:
                channel.send(message)
            except ChannelError:
                pass  # Its end will be read next.

    def close_all(self) -> None:
        for _, channel in self._nodes.values():
            channel.close()

    def _missing(self) -> list[int]:
        return [rank for rank in range(1, self._mine.nnodes) if rank not in self._nodes]

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
            channel = Channel(connection)
        except OSError:
            return  # It has gone again.
        self._selector.register(channel, selectors.EVENT_READ, channel)
        self._unknown[channel] = AuthServer(time.monotonic())
        if len(self._unknown) > _MOST_STRANGERS:
            self._forget(next(iter(self._unknown)), "it did not say who it is")

    def _hear(self, channel: Channel) -> None:
        try:
            for message in channel.receive():
                if knock := self._unknown.get(channel):
                    self._greet(channel, knock, message)
        except (ChannelError, ValueError) as error:
            self._forget(channel, str(error))

    def _greet(self, channel: Channel, knock: AuthServer, message: Message) -> None:
        """Has a newcomer say and prove who it is."""
        if knock.hello is None:
            channel.send(knock.challenge(message))
        elif answer := knock.accept(message, self._secret):
            channel.send(answer)
            self._admit(channel, knock.hello)
        else:
            node = f"node {knock.hello.rank} ({channel.peer})"
            _send_last(channel, {"refuse": f"{node} does not hold its secret; {REMEDY}"})
            raise StrangerError(f"it says that it is {node} and does not hold the secret; {REMEDY}")

    def _admit(self, channel: Channel, hello: HostInfo) -> None:
        """Takes in a node that has proven itself."""
        arrived = {rank: node.peer for rank, (_, node) in self._nodes.items()}
        problem = objection(hello, channel.peer, self._mine, {0: "node 0 itself", **arrived})
        del self._unknown[channel]
        if problem:
            _send_last(channel, {"refuse": problem})
            self._selector.unregister(channel)
            channel.close()
            raise LaunchError(problem)
        self._nodes[hello.rank] = (hello, channel)

    def _drop_silent(self) -> None:
        since = time.monotonic() - _HELLO_SECONDS
        for channel in [channel for channel, knock in self._unknown.items() if knock.since < since]:
            self._forget(channel, "it did not say who it is")

    def _forget(self, channel: Channel, why: str) -> None:
        self._selector.unregister(channel)
        channel.close()
        if self._unknown.pop(channel, None):
            say(f"dropped a connection from {channel.peer}: {why}")
            return
        rank = next(rank for rank, (_, node) in self._nodes.items() if node is channel)
        del self._nodes[rank]
        say(f"node {rank} ({channel.peer}) left before the start: {why}")

    def _agree(self) -> Rendezvous:
        hosts = {rank: hello.host or node.peer for rank, (hello, node) in self._nodes.items()}
        hosts[0] = self._mine.host or self._own_host()
        if problem := unreachable(hosts):
            raise LaunchError(problem)
        ports: Mapping[int, tuple[int, ...]] = {
            0: self._mine.ports,
            **{rank: hello.ports for rank, (hello, _) in self._nodes.items()},
        }
        addresses = worker_addresses({rank: (hosts[rank], ports[rank]) for rank in hosts})
        secret = self._secret or new_secret()
        told = "" if self._secret else secret
        first = len(ports[0])
        for rank in range(1, self._mine.nnodes):
            try:
                start = {"workers": addresses, "first": first, "secret": told}
                self._nodes[rank][1].send({"start": start})
            except ChannelError as error:
                raise LaunchError(f"node {rank} left just before the start: {error}") from error
            first += len(ports[rank])
        links = {rank: node for rank, (_, node) in self._nodes.items()}
        return Rendezvous(tuple(addresses), first=0, links=links, secret=secret)

    def _own_host(self) -> str:
        """The address at which the other nodes have reached this one, another machine's first."""
        reached = [node.local for _, (_, node) in sorted(self._nodes.items())]
        return next((host for host in reached if not host.startswith("127.")), reached[0])


def _send_last(channel: Channel, message: Message) -> None:
    try:
        channel.send(message)
    except ChannelError:
        pass


def _listen(host: str, port: int) -> socket.socket:
    """Listens at an IP address of this machine; for a name, at all of its addresses.

    A machine may resolve its own name to loopback, where the other machines cannot reach it.
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
        holder = f", which {port_holder(port)} has" if port_holder(port) else ""
        raise LaunchError(
            f"node 0 cannot listen on port {port}{holder}: {error.strerror or error}. "
            f"Choose another --rendezvous port, and one node alone for --node-rank 0."
        ) from error
