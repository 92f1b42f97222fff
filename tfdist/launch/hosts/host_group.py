"""Messages between the launchers of several hosts while the job runs.

Host 0 decides: the others report their failures to it, and it announces the first one to all. Once
a host's workers are gone it says so, and host 0 answers all hosts at once: the job has ended, or
starts again. So no message of a generation follows its end. A connection that closes before the
job has ended counts as a lost host.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict

from tfdist.launch.hosts.messages import Channel, ChannelError
from tfdist.launch.hosts.verdict import Beginning, HostEnd, Verdict
from tfdist.launch.job.decoding import decode
from tfdist.launch.job.failure import Failure, lost_host

_HOST_0 = 0


class HostGroup:
    """The other hosts of the job, as seen from one host; empty for a job on a single host.

    Args:
        host: this host's number.
        channels: open connections by host number, as in `Rendezvous`.

    Attributes:
        failure: the failure of this generation that host 0 has announced; on host 0, the one passed
            to `announce`.
        finished: whether the workers of all hosts have succeeded.
        ends: on host 0, how this generation has ended on the hosts whose workers are gone.
        lost: the first host that was lost, if any.
        stopped: on host 0, whether the launcher of another host was told to stop.
        beginning: the generation that host 0 has begun last.
    """

    def __init__(self, host: int, channels: Mapping[int, Channel]) -> None:
        self._host = host
        self._channels = dict(channels)
        self.lost: Failure | None = None
        self.stopped = False
        self._verdict: Verdict | None = None
        self.beginning = Beginning(0)
        self._reset()

    def _reset(self) -> None:
        hosts = {self._host, *self._channels} if self.decides else {self._host}
        self._unfinished = set(hosts)
        self._running = set(hosts)
        self.failure: Failure | None = None
        self.finished = False
        self.ends: dict[int, HostEnd] = {}

    @property
    def decides(self) -> bool:
        """Whether this is host 0."""
        return self._host == _HOST_0

    @property
    def all_exited(self) -> bool:
        """Whether no host has running workers, as far as host 0 knows; False on the others."""
        return self.decides and not self._running

    @property
    def awaited(self) -> list[int]:
        """On host 0, the hosts that have not told of their end; on the others, host 0."""
        return [host for host in self._channels if host not in self.ends]

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
            for kind, value in channel.receive():
                reported = self._read(host, kind, value) or reported
        except (ChannelError, ValueError):
            channel.close()
            del self._channels[host]
            self._running.discard(host)
            loss = lost_host(host, channel.peer)
            self.lost = self.lost or loss
            if self.finished or self.failure is not None:
                return reported
            if self.decides and host not in self._unfinished:
                return reported  # It had nothing left to do.
            if self.decides:
                return reported or loss
            self.failure = loss
        return reported

    def report(self, failure: Failure) -> None:
        """Reports a failed worker of this host to host 0; does nothing on host 0."""
        if not self.decides:
            self._send("failed", asdict(failure))

    def announce(self, failure: Failure) -> None:
        """Sets the failure that ends the generation; host 0 also sends it to every other host."""
        self.failure = failure
        if self.decides:
            self._send("stop", asdict(failure))

    def done(self, host: int | None = None) -> None:
        """Records that all workers of a host (by default this one) have succeeded."""
        self._unfinished.discard(self._host if host is None else host)
        self._running.discard(self._host if host is None else host)
        if not self.decides:
            self._send("done")
        elif not self._unfinished and not self.finished:
            self.finished = True
            self._send("finish")

    def exited(self) -> None:
        """Records that all workers of this host have exited, some of them with an error."""
        self._running.discard(self._host)
        if not self.decides:
            self._send("exited")

    def end(self, end: HostEnd) -> None:
        """Records how the generation has ended on this host, once its workers are gone."""
        if self.decides:
            self.ends[self._host] = end
        else:
            self._send("end", asdict(end))

    def decide(self, verdict: Verdict) -> None:
        """Sends the verdict of host 0 to every host."""
        self._send("verdict", asdict(verdict))
        self._take(verdict)
        self._verdict = None

    def take_verdict(self) -> Verdict | None:
        """What host 0 has decided, once; None before that."""
        verdict, self._verdict = self._verdict, None
        return verdict

    def begin(self, beginning: Beginning) -> None:
        """Begins the next generation on every host; on host 0."""
        self.beginning = beginning
        self._send("begin", asdict(beginning))

    def close(self) -> None:
        """Closes the connections."""
        for channel in self._channels.values():
            channel.close()

    def _take(self, verdict: Verdict) -> None:
        self._verdict = verdict
        if verdict.restart:
            self._reset()  # Now, since the messages that follow belong to the next generation.

    def _read(self, host: int, kind: str, value: object) -> Failure | None:
        if self.decides:
            return self._read_report(host, kind, value)
        if kind == "stop":
            self.failure = decode(Failure, value)
        elif kind == "finish":
            self.finished = True
        elif kind == "verdict":
            self._take(decode(Verdict, value))
        elif kind == "begin":
            self.beginning = decode(Beginning, value)
        return None

    def _read_report(self, host: int, kind: str, value: object) -> Failure | None:
        if kind == "done":
            self.done(host)
        elif kind == "exited":
            self._running.discard(host)
        elif kind == "end":
            self.ends[host] = decode(HostEnd, value)
            self._running.discard(host)
        elif kind == "failed":
            failure = decode(Failure, value)
            self.stopped = self.stopped or failure.stopped
            return failure
        return None

    def _send(self, kind: str, value: object = None) -> None:
        for channel in self._channels.values():
            channel.send(kind, value)
