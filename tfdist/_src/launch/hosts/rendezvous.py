"""The rendezvous: at the start of a job, the launchers of all other hosts connect to host 0."""

from __future__ import annotations

import errno
import select
import selectors
import socket
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, is_dataclass

from tfdist._src.cluster.auth.handshake import HELLO_SECONDS, handshake, is_closed, new_secret
from tfdist._src.cluster.auth.identity import LAUNCH, Identity
from tfdist._src.cluster.cluster_spec import Topology, Worker
from tfdist._src.cluster.membership.liveness import LivenessServer
from tfdist._src.cluster.net.dns import NameChecks, is_numeric, resolve
from tfdist._src.cluster.net.framing import printable
from tfdist._src.cluster.net.listener import port_holder
from tfdist._src.cluster.net.sockets import connect, why_unreachable
from tfdist._src.cluster.net.tls import Tls
from tfdist._src.launch.console import logger
from tfdist._src.launch.hosts.newcomers import (
    Channel,
    ChannelError,
    HostInfo,
    LateHosts,
    Message,
    Newcomers,
    Start,
    rejection,
    screen,
    unreachable,
    worker_addresses,
)
from tfdist._src.launch.job.failure import decode
from tfdist._src.options import Options
from tfdist.errors import LaunchError, TfdistError

_REPORT_SECONDS = 5.0


@dataclass(frozen=True)
class Rendezvous:
    """The result of the rendezvous, on each host.

    Attributes:
        addresses: `"host:port"` of every worker of the job, in rank order.
        first: the rank of this host's first worker.
        channels: the open connections, by the number of the other host. Host 0 has a connection to
            every other host, and each other host has a connection to host 0.
        secret: the secret of the job's workers.
        late_hosts: on host 0 of an elastic job, lets lost hosts rejoin the job; otherwise None.
        running: whether the job is already running, and this host rejoins it.
    """

    addresses: tuple[str, ...]
    first: int
    channels: dict[int, Channel] = field(default_factory=dict)
    secret: str = field(default="", repr=False)
    late_hosts: LateHosts | None = None
    running: bool = False


class Deadline:
    """A deadline for the connections of hosts; periodically reports which hosts are missing.

    Args:
        seconds: the number of seconds until the deadline.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._end = time.monotonic() + seconds
        self._next_report = time.monotonic() + min(_REPORT_SECONDS, seconds / 2)

    @property
    def left(self) -> float:
        """The number of seconds until the deadline; 0 after the deadline."""
        return max(0.0, self._end - time.monotonic())

    @property
    def next_check(self) -> float:
        """The number of seconds until the next report or until the deadline, if that is earlier."""
        return max(0.0, min(self.left, self._next_report - time.monotonic()))

    def report_due(self) -> bool:
        """Returns whether it is time for a report.

        After it has returned True, it returns False until the next report is due.
        """
        if time.monotonic() < self._next_report:
            return False
        self._next_report = time.monotonic() + _REPORT_SECONDS
        return True

    def report(self, awaited: str) -> None:
        """Prints the names of the missing hosts, and the number of seconds that remain."""
        logger.info(f"waiting for {awaited} ({self.left:.0f} s left)")


def format_hosts(hosts: list[int]) -> str:
    """Formats host numbers, such as `"host 2"` or `"hosts 2, 3"`.

    Example:
        >>> format_hosts([2, 3])
        'hosts 2, 3'
    """
    return f"host{'s' if len(hosts) > 1 else ''} {', '.join(map(str, hosts))}"


_RETRY_SECONDS = 0.2
# Host 0 and the other hosts wait for missing hosts. Host 0 may begin to wait later than this host,
# but should give up earlier, because its error message names the missing hosts. Therefore the other
# hosts wait this number of seconds longer.
_LONGER_THAN_HOST_0 = 10.0


def join(address: tuple[str, int], this_host: HostInfo, options: Options) -> Rendezvous:
    """Connects to host 0, and waits until host 0 tells this host to start its workers.

    Args:
        address: the host name and the port at which host 0 listens.
        this_host: this host.
        options: `start_timeout` is the time limit for the connection. With `secret` and the TLS
            options, both hosts prove that they belong to the job. If `secret` is not set, host 0
            creates a random secret and sends it to this host.

    Raises:
        LaunchError: host 0 does not answer, refuses this host, or cannot start the job.
        ClusterError: host 0 has another secret.
        TlsError: the certificates cannot be used, the hosts do not trust each other, or only one of
            the two hosts uses TLS.
    """
    tls = Tls.load(options)
    deadline = Deadline(options.start_timeout)
    (host_0,) = worker_addresses({0: (address[0], (address[1],))})
    server = f"host 0 at {host_0}"
    mine = Identity.of_other(f"host {this_host.number}", LAUNCH, this_host.number)
    while True:
        try:
            channel = _dial(host_0, server, mine, options.secret, tls, deadline)
            try:
                channel.send("host", asdict(this_host))
                return _await_start(channel, deadline.seconds, options.secret)
            except BaseException:
                channel.close()
                raise
        except OSError as error:
            reason = why_unreachable(error)
        except ChannelError as error:
            reason = f"it {error}"
        except TfdistError:
            raise
        except ValueError as error:
            raise LaunchError(f"{server} does not answer as a tfdist launcher ({error})") from error
        if not deadline.left:
            raise LaunchError(
                f"{server} did not answer within {deadline.seconds:.0f} s: {reason}. Start this "
                f"command there with --node-rank 0, or correct --rendezvous"
            )
        if deadline.report_due():
            deadline.report(f"{server}: {reason}")
        time.sleep(min(_RETRY_SECONDS, deadline.left))


def _dial(
    address: str, server: str, mine: Identity, secret: str, tls: Tls | None, deadline: Deadline
) -> Channel:
    """Connects to host 0, and performs the handshake in which both hosts authenticate."""
    sock = connect(resolve(address), time.monotonic() + deadline.left)
    if tls:
        sock = tls.wrap(sock, dialed=True)
    try:
        until = time.monotonic() + HELLO_SECONDS
        handshake(sock, mine, secret, until, first=True, admit=screen, name=server)
        return Channel(sock)
    except BaseException:
        sock.close()
        raise


def _messages(channel: Channel, seconds: float) -> Iterator[Message]:
    """Yields host 0's messages for at most `seconds`.

    Raises:
        LaunchError: host 0 refuses this host, or `seconds` have passed.
    """
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        if not select.select([channel], [], [], left)[0]:
            continue
        for kind, value in channel.receive():
            if kind == "refuse":
                # Without a secret, any process can pretend to be host 0. Its text must not contain
                # line breaks or control characters.
                text = printable(decode(str, value))
                raise LaunchError(f"host 0 ({channel.peer}) reports: {text}")
            yield kind, value
    raise LaunchError(f"host 0 ({channel.peer}) accepted the connection but never started the job")


def _await_start(channel: Channel, seconds: float, secret: str) -> Rendezvous:
    for kind, value in _messages(channel, seconds + _LONGER_THAN_HOST_0):
        if kind == "waiting":
            missing = format_hosts(list(decode(tuple[int, ...], value)))
            logger.info(f"connected to host 0; waiting for {missing}")
        elif kind == "start":
            start = decode(Start, value)
            return Rendezvous(
                start.workers,
                first=start.first,
                channels={0: channel},
                secret=secret or start.secret,
                running=start.running,
            )
    raise AssertionError("the messages end with an error")


def serve(address: tuple[str, int], this_host: HostInfo, options: Options) -> Rendezvous:
    """Waits on host 0 until all other hosts have connected, and tells them to start their workers.

    Args:
        address: the host name and the port on which host 0 listens.
        this_host: host 0. If the job is elastic, host 0 continues to listen after the start, so
            that lost hosts can rejoin.
        options: `start_timeout` is the time limit of the wait. With `secret` and the TLS options,
            the launchers prove to each other that they belong to the job. If `secret` is not set,
            host 0 creates a random secret and sends it to the other hosts.

    Raises:
        LaunchError: a host is missing at the deadline, or the hosts are incompatible. The hosts
            that are connected receive the same message.
        TlsError: the certificates cannot be used.
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
    """Host 0 during the rendezvous: waits until all hosts have connected.

    Args:
        newcomers: accepts the connections of the other launchers.
        this_host: host 0.
        options: the settings; only `secret` and `tls` are used.
        closed: whether only launchers of this job can authenticate. If True, the rendezvous fails
            if an incompatible host connects. If False, such a host may not belong to the job, so
            host 0 only refuses it and continues to wait.
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
        # The other hosts connect to this address. If its name does not resolve on this host, the
        # reports say so.
        names.begin([address])
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
        """Reads from a connected host, and removes the host if it has closed its connection.

        Hosts send no messages before the start, so received messages are ignored.
        """
        channel = self._hosts[number][1]
        try:
            channel.receive()
        except ChannelError as error:
            self._selector.unregister(channel)
            channel.close()
            del self._hosts[number]
            logger.warning(f"host {number} ({channel.peer}) left before the start: it {error}")

    def _admit(self, channel: Channel, host: HostInfo) -> None:
        """Adds an authenticated host to the connected hosts, or refuses it.

        Raises:
            LaunchError: the host belongs to the job, but is incompatible.
        """
        connected = {number: other.peer for number, (_, other) in self._hosts.items()}
        problem = rejection(host, channel.peer, self._this_host, {0: "host 0 itself", **connected})
        if not problem:
            self._hosts[host.number] = (host, channel)
            self._selector.register(channel, selectors.EVENT_READ, host.number)
        elif self._closed:
            channel.send("refuse", problem)
            channel.close()
            raise LaunchError(problem)
        else:  # The host may not belong to this job.
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
        """Returns an address of this host to which other hosts have connected.

        Loopback addresses (127.x.x.x) are avoided if possible, because other hosts cannot reach
        them.
        """
        reached = [channel.local for _, (_, channel) in sorted(self._hosts.items())]
        return next((address for address in reached if not address.startswith("127.")), reached[0])


def _listen(host: str, port: int) -> socket.socket:
    """Listens on `host` if it is an IP address of this host; otherwise on all its addresses.

    A name other than localhost is not resolved, because a host may resolve its own name to a
    loopback address, at which other hosts cannot reach it.
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


class OtherHosts:
    """This launcher's connections to other hosts while the job runs.

    A job on a single host has no such connections.

    Args:
        channels: the open connections by host number, as in `Rendezvous`.
        late_hosts: on host 0 of an elastic job, lets lost hosts rejoin the job; otherwise None.
        witness: tells the workers of other hosts which workers of this host are dead; None if this
            host has no such service.
    """

    def __init__(
        self,
        channels: Mapping[int, Channel],
        late_hosts: LateHosts | None = None,
        witness: LivenessServer | None = None,
    ) -> None:
        self._channels = dict(channels)
        self._late = late_hosts
        self._witness = witness

    def register(self, poll: select.poll) -> None:
        """Registers all descriptors with `poll`.

        When one of them is readable, call `receive`, `admit` or `testify`.
        """
        for one in (*self._channels.values(), self._late, self._witness):
            if one is not None:
                poll.register(one.fileno(), select.POLLIN)

    @property
    def is_busy(self) -> bool:
        """Whether `admit` and `testify` must be called soon even if no descriptor is readable."""
        return any(one.is_busy for one in (self._late, self._witness) if one is not None)

    def descriptors(self) -> dict[int, int]:
        """Returns the descriptors of the connections to other launchers, by host number."""
        return {host: channel.fileno() for host, channel in self._channels.items()}

    def send(self, kind: str, value: object = None) -> None:
        """Sends a message to all connected hosts.

        Host 0 is connected to all other hosts. Any other host is connected only to host 0.
        """
        if is_dataclass(value) and not isinstance(value, type):
            value = asdict(value)
        for channel in self._channels.values():
            channel.send(kind, value)

    def receive(self, host: int) -> list[Message]:
        """Returns the messages that have arrived from a host, without waiting.

        Raises:
            ChannelError: the connection has ended, or the received data is not a message.
        """
        return self._channels[host].receive()

    def drop(self, host: int) -> str:
        """Closes the connection to a host, and returns the IP address of the host."""
        channel = self._channels.pop(host)
        channel.close()
        return channel.peer

    def admit(self, *, over: bool) -> tuple[dict[int, str], tuple[str, ...]]:
        """Admits lost hosts after their new launchers have connected to host 0.

        Returns immediately if there are no such hosts.

        Args:
            over: whether the job is ending. Then no host can join.

        Returns:
            A dict from the number of each admitted host to its IP address, and the addresses of all
            workers of the job.
        """
        if self._late is None:
            return {}, ()
        admitted = self._late.admit(self._channels, over=over)
        self._channels.update(admitted)
        return {host: c.peer for host, c in admitted.items()}, self._late.addresses

    def testify(self) -> None:
        """Answers workers of other hosts that have asked whether a worker of this host is dead."""
        if self._witness is not None:
            self._witness.serve()

    def close(self) -> None:
        """Closes the connections."""
        for one in (*self._channels.values(), self._late, self._witness):
            if one is not None:
                one.close()
