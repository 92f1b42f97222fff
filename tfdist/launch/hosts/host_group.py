"""What the launchers of several machines tell one another while the job runs.

Node 0 judges: the others report their failures to it, and it tells all of them which one was
first. A connection that ends before the job does is a lost node.
"""

from __future__ import annotations

from collections.abc import Mapping

from tfdist.launch.hosts.channel import Channel, ChannelError, Message
from tfdist.launch.job.failure import Failure, lost_host

_NODE_0 = 0


class HostGroup:
    """The other nodes, as one node sees them; a node alone has none.

    Args:
        node: this node's number.
        links: open connections by node rank, as in `Rendezvous`.

    Attributes:
        verdict: the failure that node 0 has named; on node 0, what `announce` was given.
        finished: whether the workers of all nodes have ended well.
    """

    def __init__(self, node: int, links: Mapping[int, Channel]) -> None:
        self._node = node
        self._links = dict(links)
        self._unfinished = {node, *links} if node == _NODE_0 else {node}
        self.verdict: Failure | None = None
        self.finished = False

    @property
    def judges(self) -> bool:
        """Whether this is node 0."""
        return self._node == _NODE_0

    def links(self) -> dict[int, Channel]:
        """The connections to wait for: `receive` takes what they hold."""
        return dict(self._links)

    def receive(self, rank: int) -> Failure | None:
        """Reads from a node.

        Returns:
            A failure that node 0 has to judge; None for no news, or news in the attributes.
        """
        channel = self._links[rank]
        reported = None
        try:
            for message in channel.receive():
                reported = self._read(rank, message) or reported
        except (ChannelError, ValueError):
            channel.close()
            del self._links[rank]
            if self.finished or self.verdict is not None:
                return reported
            if self.judges and rank not in self._unfinished:
                return reported  # It had nothing left to do.
            loss = lost_host(rank, channel.peer)
            if self.judges:
                return reported or loss
            self.verdict = loss
        return reported

    def report(self, failure: Failure) -> None:
        """Tells node 0 that a worker of this node failed; nothing to do on node 0."""
        if not self.judges:
            self._send({"failed": failure.to_message()})

    def announce(self, failure: Failure) -> None:
        """Sets the verdict; node 0 also tells it to every other node."""
        self.verdict = failure
        if self.judges:
            self._send({"stop": failure.to_message()})

    def done(self, node: int | None = None) -> None:
        """Takes note that all workers of a node, by default of this one, have ended well."""
        self._unfinished.discard(self._node if node is None else node)
        if not self.judges:
            self._send({"done": True})
        elif not self._unfinished and not self.finished:
            self.finished = True
            self._send({"finish": True})

    def close(self) -> None:
        """Closes the connections."""
        for channel in self._links.values():
            channel.close()

    def _read(self, rank: int, message: Message) -> Failure | None:
        if self.judges:
            if "done" in message:
                self.done(rank)
            if "failed" in message:
                return Failure.from_message(message["failed"])
        elif "stop" in message:
            self.verdict = Failure.from_message(message["stop"])
        elif "finish" in message:
            self.finished = True
        return None

    def _send(self, message: Message) -> None:
        for channel in self._links.values():
            try:
                channel.send(message)
            except ChannelError:
                pass  # Its end will be read next.
