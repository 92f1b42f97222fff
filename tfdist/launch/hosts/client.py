"""The part of every node but node 0 in the meeting: it dials node 0 until that one answers."""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Iterator

from tfdist.cluster.auth.hmac_challenge import is_challenge
from tfdist.errors import LaunchError
from tfdist.launch.console import say
from tfdist.launch.hosts.auth import REMEDY, AuthClient
from tfdist.launch.hosts.channel import Channel, ChannelError, Message, StrangerError
from tfdist.launch.hosts.host_info import HostInfo
from tfdist.launch.hosts.rendezvous import Deadline, Rendezvous, names

_DIAL_SECONDS = 5.0
_PAUSE = 0.2
# Node 0 began to wait at another time; its own deadline, which names who is missing, comes first.
_LONGER_THAN_NODE_0 = 10.0


def join(at: tuple[str, int], mine: HostInfo, seconds: float, secret: str) -> Rendezvous:
    """Dials node 0 and waits for its answer.

    Args:
        at: host and port of node 0.
        mine: this node.
        seconds: how long to dial.
        secret: what was set for the job; "" where nothing was, and node 0 tells a random one.

    Raises:
        LaunchError: node 0 is not there, or holds another secret, or says why the job cannot start.
    """
    patience = Deadline(seconds)
    where = f"node 0 at {at[0]}:{at[1]}"
    while True:
        try:
            channel = _dial(at, patience)
            try:
                visitor = AuthClient(mine, secret)
                channel.send(visitor.knock)
                messages = _messages(channel, seconds + _LONGER_THAN_NODE_0)
                _be_admitted(channel, visitor, messages)
                return _answer(channel, messages, secret)
            except BaseException:
                channel.close()
                raise
        except StrangerError as error:
            raise LaunchError(f"{where} does not answer: {error}") from error
        except (OSError, ChannelError) as error:
            reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        if not patience.left:
            raise LaunchError(
                f"{where} did not answer within {seconds:.0f} s ({reason}): start this command "
                f"there with --node-rank 0, or correct --rendezvous"
            )
        if patience.report_due():
            patience.say_waiting(f"{where}: {reason}")
        time.sleep(min(_PAUSE, patience.left))


def _dial(at: tuple[str, int], patience: Deadline) -> Channel:
    connection = socket.create_connection(at, max(0.1, min(_DIAL_SECONDS, patience.left)))
    if connection.getsockname() == connection.getpeername():
        # While nobody listens on a local port, the kernel may pick it for our own end.
        connection.close()
        raise ConnectionRefusedError(0, "Connection refused")
    return Channel(connection)


def _messages(channel: Channel, seconds: float) -> Iterator[Message]:
    """What node 0 says; a message that refuses this node becomes the error."""
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        if not select.select([channel], [], [], left)[0]:
            continue
        for message in channel.receive():
            if "refuse" in message:
                # Node 0 may not have proven itself: its text must not be able to write lines.
                text = "".join(c if c.isprintable() else "?" for c in str(message["refuse"]))
                raise LaunchError(f"node 0 ({channel.peer}) says: {text}")
            yield message
    raise LaunchError(f"node 0 ({channel.peer}) took the call but never said to start")


def _be_admitted(channel: Channel, visitor: AuthClient, messages: Iterator[Message]) -> None:
    """Proves this node to node 0 and has that one prove itself."""
    challenge = next(messages)
    if not is_challenge(challenge.get("challenge")):
        raise StrangerError("it is no tfdist launcher: it does not ask who calls")
    channel.send(visitor.answer(challenge))
    if not visitor.trusts(next(messages).get("proof")):
        raise StrangerError(f"it does not hold the secret; {REMEDY}")


def _answer(channel: Channel, messages: Iterator[Message], secret: str) -> Rendezvous:
    for message in messages:
        try:
            if "waiting" in message:
                missing = names([int(rank) for rank in message["waiting"]])
                say(f"node 0 is there; waiting for {missing}")
            if "start" not in message:
                continue
            start = message["start"]
            return Rendezvous(
                tuple(str(address) for address in start["workers"]),
                first=int(start["first"]),
                links={0: channel},
                secret=secret or str(start["secret"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise StrangerError(f"it is no tfdist launcher: {error!r}") from error
    raise AssertionError("the messages end with an error")
