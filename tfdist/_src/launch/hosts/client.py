"""The rendezvous client, run by every host but host 0: dials host 0 until it answers."""

from __future__ import annotations

import select
import time
from collections.abc import Iterator
from dataclasses import asdict

from tfdist._src.cluster.auth.handshake import HELLO_SECONDS, handshake
from tfdist._src.cluster.auth.identity import LAUNCH, Identity
from tfdist._src.cluster.net.dns import resolve
from tfdist._src.cluster.net.framing import printable
from tfdist._src.cluster.net.sockets import connect, why_unreachable
from tfdist._src.cluster.net.tls import Tls
from tfdist._src.launch.console import say
from tfdist._src.launch.hosts.host_info import HostInfo, worker_addresses
from tfdist._src.launch.hosts.messages import Channel, ChannelError, Message, Start
from tfdist._src.launch.hosts.newcomers import screen
from tfdist._src.launch.hosts.rendezvous import Deadline, Rendezvous, format_hosts
from tfdist._src.launch.job.decoding import decode
from tfdist._src.options import Options
from tfdist.errors import LaunchError, TfdistError

_RETRY_SECONDS = 0.2
# Host 0 started waiting at another time; its deadline, which names the missing hosts, goes first.
_LONGER_THAN_HOST_0 = 10.0


def join(address: tuple[str, int], this_host: HostInfo, options: Options) -> Rendezvous:
    """Dials host 0 and waits for its answer.

    Args:
        address: host and port of host 0.
        this_host: this host.
        options: `start_timeout` is how long to dial; `secret` and the TLS options authenticate
            both ends. Without a secret, host 0 sends a random one.

    Raises:
        LaunchError: host 0 does not answer, or cannot start the job.
        ClusterError: host 0 has another secret.
        TlsError: the certificates are unusable, the two do not trust each other, or only one of
            them uses TLS.
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
    """Connects to host 0; both ends authenticate."""
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
    """The messages of host 0; raises if it refuses this host."""
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        if not select.select([channel], [], [], left)[0]:
            continue
        for kind, value in channel.receive():
            if kind == "refuse":
                # Without a secret, anybody may be host 0: its text must not contain line breaks.
                text = printable(decode(str, value))
                raise LaunchError(f"host 0 ({channel.peer}) reports: {text}")
            yield kind, value
    raise LaunchError(f"host 0 ({channel.peer}) accepted the connection but never started the job")


def _await_start(channel: Channel, seconds: float, secret: str) -> Rendezvous:
    for kind, value in _messages(channel, seconds + _LONGER_THAN_HOST_0):
        if kind == "waiting":
            missing = format_hosts(list(decode(tuple[int, ...], value)))
            say(f"connected to host 0; waiting for {missing}")
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
