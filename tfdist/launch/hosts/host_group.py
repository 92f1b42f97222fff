"""Messages between the launchers of several hosts while the job runs.

Host 0 decides: the others report their failures to it, and it announces the first one to all. A
connection that closes before the job has ended counts as a lost host.
"""

from __future__ import annotations

from collections.abc import Mapping

from tfdist.launch.hosts.channel import Channel, ChannelError, Message
from tfdist.launch.job.failure import Failure, lost_host

_HOST_0 = 0


class HostGroup:
    """The other hosts of the job, as seen from one host; empty for a job on a single host.

    Args:
        host: this host's number.
        channels: open connections by host number, as in `Rendezvous`.

    Attributes:
        failure: the failure that host 0 has announced; on host 0, the one passed to `announce`.
        finished: whether the workers of all hosts have succeeded.
    """

    def __init__(self, host: int, channels: Mapping[int, Channel]) -> None:
        self._host = host
        self._channels = dict(channels)
        self._unfinished = {host, *channels} if host == _HOST_0 else {host}
        self.failure: Failure | None = None
        self.finished = False

    @property
    def decides(self) -> bool:
        """Whether this is host 0."""
        return self._host == _HOST_0

    def channels(self) -> dict[int, Channel]:
        """The connections to wait on; read them with `receive`."""
        return dict(self._channels)

    def receive(self, host: int) -> Failure | None:
        """Reads from a host.

        Returns:
            A failure for host 0 to decide on; None otherwise (the attributes may have changed).
        """
        channel = self._channels[host]
        reported = None
        try:
            for message in channel.receive():
                reported = self._read(host, message) or reported
        except (ChannelError, ValueError):
            channel.close()
            del self._channels[host]
            if self.finished or self.failure is not None:
                return reported
            if self.decides and host not in self._unfinished:
                return reported  # It had nothing left to do.
            loss = lost_host(host, channel.peer)
            if self.decides:
                return reported or loss
            self.failure = loss
        return reported

    def report(self, failure: Failure) -> None:
        """Reports a failed worker of this host to host 0; does nothing on host 0."""
        if not self.decides:
            self._send({"failed": failure.to_message()})

    def announce(self, failure: Failure) -> None:
        """Sets the failure that ends the job; host 0 also sends it to every other host."""
        self.failure = failure
        if self.decides:
            self._send({"stop": failure.to_message()})

    def done(self, host: int | None = None) -> None:
        """Records that all workers of a host (by default this one) have succeeded."""
        self._unfinished.discard(self._host if host is None else host)
        if not self.decides:
            self._send({"done": True})
        elif not self._unfinished and not self.finished:
            self.finished = True
            self._send({"finish": True})

    def close(self) -> None:
        """Closes the connections."""
        for channel in self._channels.values():
            channel.close()

    def _read(self, host: int, message: Message) -> Failure | None:
        if self.decides:
            if "done" in message:
                self.done(host)
            if "failed" in message:
                return Failure.from_message(message["failed"])
        elif "stop" in message:
            self.failure = Failure.from_message(message["stop"])
        elif "finish" in message:
            self.finished = True
        return None

    def _send(self, message: Message) -> None:
        for channel in self._channels.values():
            try:
                channel.send(message)
            except ChannelError:
                pass  # `receive` will notice that it is closed.
