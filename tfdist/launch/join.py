"""The part of every node but node 0 in the meeting: it dials node 0 until that one answers."""

from __future__ import annotations

import select
import socket
import time

from tfdist.errors import LaunchError
from tfdist.launch.channel import Channel, ChannelError, Message, StrangerError
from tfdist.launch.console import say
from tfdist.launch.hello import Hello
from tfdist.launch.meeting import Meeting, Patience, names

_DIAL_SECONDS = 5.0
_PAUSE = 0.2
# Node 0 began to wait at another time; its own deadline, which names who is missing, comes first.
_LONGER_THAN_NODE_0 = 10.0


def join(at: tuple[str, int], mine: Hello, seconds: float) -> Meeting:
    """Dials node 0 and waits for its answer.

    Args:
        at: host and port of node 0.
        mine: this node.
        seconds: how long to dial.

    Raises:
        LaunchError: node 0 is not there, or says why the job cannot start.
    """
    patience = Patience(seconds)
    where = f"node 0 at {at[0]}:{at[1]}"
    while True:
        try:
            channel = _dial(at, patience)
            try:
                channel.send(mine.to_message())
                return _answer(channel, seconds + _LONGER_THAN_NODE_0)
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


def _dial(at: tuple[str, int], patience: Patience) -> Channel:
    connection = socket.create_connection(at, max(0.1, min(_DIAL_SECONDS, patience.left)))
    if connection.getsockname() == connection.getpeername():
        # While nobody listens on a local port, the kernel may pick it for our own end.
        connection.close()
        raise ConnectionRefusedError(0, "Connection refused")
    return Channel(connection)


def _answer(channel: Channel, seconds: float) -> Meeting:
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        if not select.select([channel], [], [], left)[0]:
            continue
        for message in channel.receive():
            meeting = _read(channel, message)
            if meeting is not None:
                return meeting
    raise LaunchError(f"node 0 ({channel.peer}) took the call but never said to start")


def _read(channel: Channel, message: Message) -> Meeting | None:
    try:
        if "refuse" in message:
            raise LaunchError(f"node 0 ({channel.peer}) says: {message['refuse']}")
        if "waiting" in message:
            say(f"node 0 is there; waiting for {names([int(r) for r in message['waiting']])}")
        if "start" not in message:
            return None
        start = message["start"]
        addresses = tuple(str(address) for address in start["workers"])
        return Meeting(addresses, first=int(start["first"]), links={0: channel})
    except (KeyError, TypeError, ValueError) as error:
        raise StrangerError(f"it is no tfdist launcher: {error!r}") from error
