"""Host 0's listener: accepts launchers that hold the job's secret."""

from __future__ import annotations

import selectors
import socket
import time

from tfdist.launch.console import say
from tfdist.launch.hosts.auth import REMEDY, AuthServer
from tfdist.launch.hosts.channel import Channel, ChannelError, Message, ProtocolError
from tfdist.launch.hosts.host_info import HostInfo

_HELLO_SECONDS = 10.0
_MAX_PENDING = 64


class HostListener:
    """The listener, and the connections that have not proved themselves yet.

    Args:
        listener: a listening socket, which it owns.
        secret: the job's secret, which every host must prove; "" if none was set.
    """

    def __init__(self, listener: socket.socket, secret: str) -> None:
        self._listener = listener
        self._secret = secret
        self._selector = selectors.EpollSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        self._pending: dict[Channel, AuthServer] = {}

    def fileno(self) -> int:
        """The descriptor to wait on before `newcomers`."""
        return self._selector.fileno()

    def newcomers(self) -> list[tuple[HostInfo, Channel]]:
        """Handles what has arrived, without waiting.

        Returns:
            The hosts that have authenticated since the last call.
        """
        arrived = []
        for key, _ in self._selector.select(0):
            if key.fileobj is self._listener:
                self._accept()
            elif (host := self._receive(key.data)) is not None:
                arrived.append((host, key.data))
        self._drop_silent()
        return arrived

    def close(self) -> None:
        """Stops listening, and closes the pending connections."""
        self._listener.close()
        for channel in self._pending:
            channel.close()
        self._selector.close()

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
            channel = Channel(connection)
        except OSError:
            return  # Already closed again.
        self._selector.register(channel, selectors.EVENT_READ, channel)
        self._pending[channel] = AuthServer(time.monotonic())
        if len(self._pending) > _MAX_PENDING:
            self._drop(next(iter(self._pending)), "did not identify itself in time")

    def _receive(self, channel: Channel) -> HostInfo | None:
        try:
            for message in channel.receive():
                if self._authenticate(channel, self._pending[channel], message):
                    self._selector.unregister(channel)
                    return self._pending.pop(channel).host
        except (ChannelError, ValueError) as error:
            self._drop(channel, str(error))
        return None

    def _authenticate(self, channel: Channel, auth: AuthServer, message: Message) -> bool:
        """Handles the next message of a pending connection; whether it was the last one."""
        if auth.host is None:
            channel.send(auth.challenge(message))
            return False
        if answer := auth.accept(message, self._secret):
            channel.send(answer)
            return True
        name = f"host {auth.host.number} ({channel.peer})"
        send_last(channel, {"refuse": f"{name} does not hold the secret; {REMEDY}"})
        raise ProtocolError(f"claims to be {name} but does not hold the secret; {REMEDY}")

    def _drop_silent(self) -> None:
        since = time.monotonic() - _HELLO_SECONDS
        for channel in [channel for channel, auth in self._pending.items() if auth.since < since]:
            self._drop(channel, "did not identify itself in time")

    def _drop(self, channel: Channel, reason: str) -> None:
        self._selector.unregister(channel)
        channel.close()
        del self._pending[channel]
        say(f"dropped a connection from {channel.peer}: it {reason}")


def send_last(channel: Channel, message: Message) -> None:
    """Sends a message to a host that may be gone."""
    try:
        channel.send(message)
    except ChannelError:
        pass
