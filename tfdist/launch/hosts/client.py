"""The rendezvous client, run by every host but host 0: dials host 0 until it answers."""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Iterator

from tfdist.cluster.auth.hmac_challenge import is_challenge
from tfdist.cluster.net.printable import printable
from tfdist.errors import LaunchError
from tfdist.launch.console import say
from tfdist.launch.hosts.auth import REMEDY, AuthClient
from tfdist.launch.hosts.channel import Channel, ChannelError, Message, ProtocolError
from tfdist.launch.hosts.host_info import HostInfo
from tfdist.launch.hosts.rendezvous import Deadline, Rendezvous, format_hosts

_DIAL_SECONDS = 5.0
_RETRY_SECONDS = 0.2
# Host 0 started waiting at another time; its deadline, which names the missing hosts, goes first.
_LONGER_THAN_HOST_0 = 10.0


def join(address: tuple[str, int], this_host: HostInfo, seconds: float, secret: str) -> Rendezvous:
    """Dials host 0 and waits for its answer.

    Args:
        address: host and port of host 0.
        this_host: this host.
        seconds: how long to dial.
        secret: the job's secret; "" if none was set, in which case host 0 sends a random one.

    Raises:
        LaunchError: host 0 does not answer, has another secret, or cannot start the job.
    """
    deadline = Deadline(seconds)
    server = f"host 0 at {address[0]}:{address[1]}"
    while True:
        try:
            channel = _dial(address, deadline)
            try:
                auth = AuthClient(this_host, secret)
                channel.send(auth.hello)
                messages = _messages(channel, seconds + _LONGER_THAN_HOST_0)
                _authenticate(channel, auth, messages)
                return _await_start(channel, messages, secret)
            except BaseException:
                channel.close()
                raise
        except ProtocolError as error:
            raise LaunchError(f"{server} {error}") from error
        except (OSError, ChannelError) as error:
            reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        if not deadline.left:
            raise LaunchError(
                f"{server} did not answer within {seconds:.0f} s ({reason}): start this command "
                f"there with --node-rank 0, or correct --rendezvous"
            )
        if deadline.report_due():
            deadline.report(f"{server}: {reason}")
        time.sleep(min(_RETRY_SECONDS, deadline.left))


def _dial(address: tuple[str, int], deadline: Deadline) -> Channel:
    connection = socket.create_connection(address, max(0.1, min(_DIAL_SECONDS, deadline.left)))
    if connection.getsockname() == connection.getpeername():
        # While nothing listens on a local port, the kernel may pick it as the source port.
        connection.close()
        raise ConnectionRefusedError(0, "Connection refused")
    return Channel(connection)


def _messages(channel: Channel, seconds: float) -> Iterator[Message]:
    """The messages of host 0; raises if it refuses this host."""
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        if not select.select([channel], [], [], left)[0]:
            continue
        for message in channel.receive():
            if "refuse" in message:
                # Host 0 may be unauthenticated: its text must not contain line breaks.
                text = printable(str(message["refuse"]))
                raise LaunchError(f"host 0 ({channel.peer}) reports: {text}")
            yield message
    raise LaunchError(f"host 0 ({channel.peer}) accepted the connection but never started the job")


def _authenticate(channel: Channel, auth: AuthClient, messages: Iterator[Message]) -> None:
    """Authenticates this host to host 0, and host 0 to this host."""
    challenge = next(messages)
    if not is_challenge(challenge.get("challenge")):
        raise ProtocolError("is not a tfdist launcher: it sent no challenge")
    channel.send(auth.answer(challenge))
    if not auth.trusts(next(messages).get("proof")):
        raise ProtocolError(f"does not hold the secret; {REMEDY}")


def _await_start(channel: Channel, messages: Iterator[Message], secret: str) -> Rendezvous:
    for message in messages:
        try:
            if "waiting" in message:
                missing = format_hosts([int(host) for host in message["waiting"]])
                say(f"connected to host 0; waiting for {missing}")
            if "start" not in message:
                continue
            start = message["start"]
            return Rendezvous(
                tuple(str(address) for address in start["workers"]),
                first=int(start["first"]),
                channels={0: channel},
                secret=secret or str(start["secret"]),
                running=bool(start.get("running")),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ProtocolError(f"is not a tfdist launcher: {error!r}") from error
    raise AssertionError("the messages end with an error")
