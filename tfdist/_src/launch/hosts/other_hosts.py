"""The connections to the launchers of the other hosts while the job runs."""

from __future__ import annotations

import select
from collections.abc import Mapping
from dataclasses import asdict, is_dataclass

from tfdist._src.cluster.membership.liveness import Witness
from tfdist._src.launch.hosts.late_hosts import LateHosts
from tfdist._src.launch.hosts.messages import Channel, Message


class OtherHosts:
    """The other hosts of the job; empty for a job on a single host.

    Args:
        channels: open connections by host number, as in `Rendezvous`.
        late_hosts: on host 0 of an elastic job, admits lost hosts again.
        witness: tells the workers of other hosts which workers of this one are dead.
    """

    def __init__(
        self,
        channels: Mapping[int, Channel],
        late_hosts: LateHosts | None = None,
        witness: Witness | None = None,
    ) -> None:
        self._channels = dict(channels)
        self._late = late_hosts
        self._witness = witness

    def register(self, poll: select.poll) -> None:
        """Registers the descriptors to wait on before `receive`, `admit` and `testify`."""
        for one in (*self._channels.values(), self._late, self._witness):
            if one is not None:
                poll.register(one.fileno(), select.POLLIN)

    @property
    def is_busy(self) -> bool:
        """Whether `admit` and `testify` must be called soon, even if nothing happens."""
        return any(one.is_busy for one in (self._late, self._witness) if one is not None)

    def descriptors(self) -> dict[int, int]:
        """The descriptors of the connections by host number."""
        return {host: channel.fileno() for host, channel in self._channels.items()}

    def send(self, kind: str, value: object = None) -> None:
        """Sends a message to all connected hosts; on the others than host 0, that is host 0."""
        if is_dataclass(value) and not isinstance(value, type):
            value = asdict(value)
        for channel in self._channels.values():
            channel.send(kind, value)

    def receive(self, host: int) -> list[Message]:
        """Reads from a host, whose descriptor is readable.

        Raises:
            ChannelError: the connection is closed.
        """
        return self._channels[host].receive()

    def drop(self, host: int) -> str:
        """Closes the connection with a host; returns its IP address."""
        channel = self._channels.pop(host)
        channel.close()
        return channel.peer

    def admit(self, *, over: bool) -> tuple[dict[int, str], tuple[str, ...]]:
        """Admits lost hosts whose launchers have been started again, without waiting.

        Args:
            over: whether the job is ending, so that no host can join.

        Returns:
            The IP addresses of the admitted hosts by number, and the addresses of all workers.
        """
        if self._late is None:
            return {}, ()
        admitted = self._late.admit(self._channels, over=over)
        self._channels.update(admitted)
        return {host: c.peer for host, c in admitted.items()}, self._late.addresses

    def testify(self) -> None:
        """Answers workers of other hosts that ask whether one of this host is dead."""
        if self._witness is not None:
            self._witness.serve()

    def close(self) -> None:
        """Closes the connections."""
        for one in (*self._channels.values(), self._late, self._witness):
            if one is not None:
                one.close()
