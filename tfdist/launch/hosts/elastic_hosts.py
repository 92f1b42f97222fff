"""Messages between the launchers of an elastic job while it runs.

Each host tells host 0 what has become of its workers, and host 0 tells all what has become of the
job. A host that is lost ends nothing: the others go on. Without host 0 each host goes on by itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace

from tfdist.cluster.membership.witness import Witness
from tfdist.exit_codes import PREEMPTED
from tfdist.launch.hosts.late_hosts import LateHosts
from tfdist.launch.hosts.messages import Channel, ChannelError
from tfdist.launch.hosts.worker_counts import WorkerCounts, total
from tfdist.launch.job.decoding import decode
from tfdist.launch.job.failure import Failure, lost_host
from tfdist.launch.job.losses import Loss, decisive

_HOST_0 = 0


class ElasticHosts:
    """The other hosts of an elastic job; empty for a job on a single host.

    Args:
        host: this host's number.
        channels: open connections by host number, as in `Rendezvous`.
        late_hosts: on host 0, admits launchers that come again.
        witness: tells the workers of other hosts which workers of this one are dead.
        num_hosts: how many hosts the job was started on.

    Attributes:
        job: the counts of all hosts, as far as this one knows.
        losses: those of this host; on host 0, those of all hosts, in the order of arrival.
        addresses: the addresses of all workers, once a host has come again with others.
        stop: why the whole job is to stop, if it is.
        code: the job's exit code, once it has ended on all hosts.
    """

    def __init__(
        self,
        host: int,
        channels: Mapping[int, Channel],
        late_hosts: LateHosts | None = None,
        witness: Witness | None = None,
        num_hosts: int = 1,
    ) -> None:
        self._host = host
        self._num_hosts = num_hosts
        self._channels = dict(channels)
        self._late = late_hosts
        self._witness = witness
        # Whoever has not told yet runs.
        self._counts = {number: WorkerCounts(members=1) for number in (host, *self._channels)}
        self._left: set[int] = set()
        self._news: list[str] = []
        self._told = False
        self.job = total(self._counts.values())
        self.losses: list[Loss] = []
        self.addresses: tuple[str, ...] = ()
        self.stop: Failure | None = None
        self.code: int | None = None

    @property
    def _decides(self) -> bool:
        return self._host == _HOST_0 or not self._channels

    @property
    def coordinated(self) -> bool:
        """Whether host 0 will tell how the job has ended."""
        return not self._decides

    @property
    def alone(self) -> bool:
        """Whether no other host has workers, nor will have: host 0, the only other one, is lost."""
        return self._host != _HOST_0 and not self._channels and self._num_hosts == 2

    def descriptors(self) -> list[int]:
        """Those to wait on before `receive`, `admit` and `testify`."""
        own = [one.fileno() for one in (self._late, self._witness) if one is not None]
        return own + [channel.fileno() for channel in self._channels.values()]

    @property
    def is_busy(self) -> bool:
        """Whether `admit` and `testify` have to be called soon, even if nothing happens."""
        return any(one.is_busy for one in (self._late, self._witness) if one is not None)

    def channels(self) -> dict[int, int]:
        """The descriptors of the hosts' connections."""
        return {host: channel.fileno() for host, channel in self._channels.items()}

    def news(self) -> list[str]:
        """What is to be told to the user since the last call."""
        news, self._news = self._news, []
        return news

    def update(self, counts: WorkerCounts) -> None:
        """Tells what has become of this host's workers."""
        if self._told and self._counts[self._host] == counts:
            return
        self._told = True
        self._counts[self._host] = counts
        if self._decides:
            self._merge()
        else:
            self._send("counts", asdict(counts))

    def lose(self, loss: Loss) -> None:
        """Tells of a failure on this host."""
        self.losses.append(loss)
        if not self._decides:
            self._send("loss", asdict(loss))

    def stop_all(self, failure: Failure) -> None:
        """Stops the job on all hosts."""
        self.stop = failure
        self._send("stop", asdict(failure))

    def leave(self) -> None:
        """Tells that this host leaves the job, which goes on elsewhere."""
        self._send("leave")

    def admit(self) -> None:
        """Admits the launchers that have come again; on host 0."""
        if self._late is None:
            return
        over = bool(self.job.completed) or self.stop is not None or self.code is not None
        admitted = self._late.admit(self._channels, over=over)
        if not admitted:
            return
        self._channels.update(admitted)
        self.addresses = self._late.addresses
        self._send("addresses", self.addresses)
        for host, channel in admitted.items():
            self._left.discard(host)
            self._counts[host] = WorkerCounts(joining=1)
            self.losses = [_come_again(loss, host) for loss in self.losses]
            self._news.append(f"host {host} ({channel.peer}) has come again; its workers join.")
        self._merge()

    def testify(self) -> None:
        """Answers the workers of other hosts that ask for the death of one of this host."""
        if self._witness is not None:
            self._witness.serve()

    def receive(self, host: int) -> None:
        """Reads from a host."""
        try:
            for kind, value in self._channels[host].receive():
                self._read(host, kind, value)
        except (ChannelError, ValueError):
            self._lost(host)

    def close(self) -> None:
        """Closes the connections."""
        for channel in self._channels.values():
            channel.close()
        for one in (self._late, self._witness):
            if one is not None:
                one.close()

    def _lost(self, host: int) -> None:
        channel = self._channels.pop(host)
        channel.close()
        self._counts[host] = self._counts[host].gone
        quiet = host in self._left or self.stop is not None or self.code is not None
        if self._host != _HOST_0:
            self._counts = {self._host: self._counts[self._host]}
            if not quiet or host in self._left:
                self._news.append(self._without_host_0(channel, left=host in self._left))
        elif not quiet:
            loss = Loss(lost_host(host, channel.peer), "the others went on without it", final=True)
            self.losses.append(loss)
            self._news.append(f"{loss.failure} The others go on without it.")
        self._merge()

    @staticmethod
    def _without_host_0(channel: Channel, *, left: bool) -> str:
        what = (
            f"host 0 ({channel.peer}) was told to stop."
            if left
            else str(lost_host(_HOST_0, channel.peer))
        )
        return f"{what} This host goes on without it, and cannot admit hosts that come again."

    def _read(self, host: int, kind: str, value: object) -> None:
        if kind == "stop":
            if self.stop is None:
                self.stop = decode(Failure, value)
                if self._host == _HOST_0:
                    self._send("stop", asdict(self.stop))
        elif kind == "leave":
            self._left.add(host)
            if self._host == _HOST_0:
                self._news.append(f"host {host} was told to stop; the others go on without it.")
        elif self._host == _HOST_0:
            self._read_report(host, kind, value)
        elif kind == "job":
            self.job = decode(WorkerCounts, value)
        elif kind == "addresses":
            self.addresses = decode(tuple[str, ...], value)
        elif kind == "end":
            self.code = min(max(decode(int, value), 0), 255)

    def _read_report(self, host: int, kind: str, value: object) -> None:
        if kind == "counts":
            self._counts[host] = decode(WorkerCounts, value)
            self._merge()
        elif kind == "loss":
            self.losses.append(decode(Loss, value))

    def _merge(self) -> None:
        """Adds up what is known, and tells the others."""
        if not self._decides:
            return
        self.job = total(self._counts.values())
        self._send("job", asdict(self.job))
        if self.job.ended and self.code is None:
            self.code = job_code(self.losses, self.job)
            self._send("end", self.code)

    def _send(self, kind: str, value: object = None) -> None:
        for channel in self._channels.values():
            channel.send(kind, value)


def _come_again(loss: Loss, host: int) -> Loss:
    """A loss in the light of a host that has come again."""
    if loss.failure.rank is None and loss.failure.host == host:
        return replace(loss, fate="it came again later", final=False)
    return loss


def job_code(losses: list[Loss], job: WorkerCounts) -> int:
    """The exit code of a job that was not stopped.

    Example:
        >>> job_code([], WorkerCounts(completed=1, left=1))
        0
    """
    failure = decisive(losses, completed=bool(job.completed), left=bool(job.left))
    if failure is not None:
        return failure.code
    return PREEMPTED if job.left and not job.completed else 0
