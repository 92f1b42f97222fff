"""The policy "one": only the failed worker is replaced, and the other workers keep running.

Each host counts its workers in each state, and reports the numbers to host 0. Host 0 adds up the
numbers, and sends the sums to all hosts. If a host is lost, the other hosts continue. If host 0 is
lost, each other host continues by itself, without messages from the others.
"""

from __future__ import annotations

import enum
import logging
import math
import signal
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace

from tfdist._src.launch import restart_policy
from tfdist._src.launch.job.failure import (
    Failure,
    Loss,
    decisive,
    decode,
    describe_end,
    describe_leave,
    describe_loss,
)
from tfdist._src.launch.job.shutdown import Grace
from tfdist._src.options import PREEMPTED

_LOOK_SECONDS = 1.0
# The launcher kills a suspended worker this number of seconds after the time at which the other
# workers give it up.
_MARGIN_SECONDS = 5.0


@dataclass(frozen=True)
class WorkerCounts:
    """The number of workers of a host or of the job in each state.

    Attributes:
        members: running workers that were started with the job, and running replacements that have
            completed a step.
        joining: running replacements that have not completed a step so far.
        waiting: replacements that will start after a delay.
        completed: workers that have exited with code 0.
        left: workers that were asked to stop, have saved their state and have exited with code 75.
        lost: workers that have failed and are not replaced.

    Example:
        >>> WorkerCounts(members=2) + WorkerCounts(joining=1, lost=1)
        WorkerCounts(members=2, joining=1, waiting=0, completed=0, left=0, lost=1)
    """

    members: int = 0
    joining: int = 0
    waiting: int = 0
    completed: int = 0
    left: int = 0
    lost: int = 0

    def __post_init__(self) -> None:
        if min(asdict(self).values()) < 0:
            raise ValueError("numbers of workers must not be negative")

    def __add__(self, other: WorkerCounts) -> WorkerCounts:
        return WorkerCounts(**{name: asdict(self)[name] + n for name, n in asdict(other).items()})

    @property
    def ended(self) -> bool:
        """Whether no worker is running or will start."""
        return not (self.members or self.joining or self.waiting)

    @property
    def over(self) -> bool:
        """Whether the training has ended.

        Then replacements that have not completed a step are no longer needed.
        """
        return self.completed + self.left > 0 and not self.members

    @property
    def gone(self) -> WorkerCounts:
        """The counts of the same host after it was lost: all its running workers count as lost."""
        lost = self.members + self.joining + self.waiting + self.lost
        return replace(self, members=0, joining=0, waiting=0, lost=lost)


class _State(enum.Enum):
    """The state of a worker.

    The first six states are the attributes of `WorkerCounts`, which does not count workers in the
    last two states.
    """

    MEMBER = "members"
    JOINING = "joining"
    WAITING = "waiting"
    COMPLETED = "completed"
    LEFT = "left"
    LOST = "lost"
    # The other workers completed the training before this worker joined, or while it was suspended.
    UNNEEDED = "unneeded"
    # The worker has exited, or will not be started, because this command was asked to stop.
    STOPPED = "stopped"


@dataclass
class _Worker:
    state: _State
    since: float
    due: float = 0.0
    suspended_since: float | None = None
    history: list[restart_policy.Ended] = field(default_factory=list)


class RestartOne(restart_policy.RestartPolicy):
    """Replaces each failed worker while the other workers keep running.

    Args:
        ranks: the ranks of this host's workers.
        host: this host's number.
        hosts: the numbers of the other hosts that are connected to this host.
        grace: how long to wait between two signals when workers are stopped.
        limit: the maximum number of replacements of each worker.
        now: the current time.
        silence: the number of seconds after which workers give up another worker that does not
            respond. The launcher kills a worker that is suspended for longer than this. However, if
            all workers of this host are suspended while the training is in progress, a scheduler
            has probably suspended the job, and the launcher kills none of them.
        num_hosts: the number of hosts at the start of the job.
        joining: whether this host was lost before, and now rejoins the running job.

    Attributes:
        losses: on host 0, the losses of all hosts; on other hosts, the losses of this host. They
            are in the order in which this host was informed of them.

    Example:
        >>> policy = RestartOne([0, 1], 0, [], Grace.given(None), limit=3, now=0.0, silence=60.0)
        >>> policy.exited(0, None, now=9.0)
        >>> policy.counts
        WorkerCounts(members=1, joining=0, waiting=0, completed=1, left=0, lost=0)
    """

    def __init__(
        self,
        ranks: Sequence[int],
        host: int,
        hosts: Iterable[int],
        grace: Grace,
        *,
        limit: int,
        now: float,
        silence: float,
        num_hosts: int = 1,
        joining: bool = False,
    ) -> None:
        super().__init__(ranks, host, hosts, grace)
        state = _State.JOINING if joining else _State.MEMBER
        self._workers = {rank: _Worker(state, now) for rank in ranks}
        self._limit = limit
        self._patience = silence + _MARGIN_SECONDS
        self._num_hosts = num_hosts
        self.next_look = now
        # The numbers of workers of each connected host. A host that has not reported any numbers
        # so far counts as a host with one running worker.
        self._counts = {number: WorkerCounts(members=1) for number in (host, *self._connected)}
        self._reported = False
        self._job = self._total()
        self.losses: list[Loss] = []
        self._left: set[int] = set()  # The numbers of the hosts that were asked to stop.
        self._job_stopped: Failure | None = None  # The reason to stop the job on all hosts, if any.
        self._stopped: Failure | None = None  # The reason to stop the job on this host, if any.
        self._codes: set[int] = set()
        self._code: int | None = None  # The job's exit code, once it has ended on all hosts.
        self._running = set(ranks)
        self._do(restart_policy.Begin(0), *map(restart_policy.Start, ranks))
        self._update()

    @property
    def _decides(self) -> bool:
        return self._host == restart_policy.HOST_0 or not self._connected

    @property
    def counts(self) -> WorkerCounts:
        """The numbers of workers of this host in each state."""
        states = [worker.state.value for worker in self._workers.values()]
        return WorkerCounts(**{f.name: states.count(f.name) for f in fields(WorkerCounts)})

    def _in(self, *states: _State) -> list[int]:
        """Returns the ranks of this host's workers that are in any of the given states."""
        return [rank for rank, worker in self._workers.items() if worker.state in states]

    def _move(self, ranks: Iterable[int], state: _State) -> None:
        for rank in ranks:
            self._workers[rank].state = state

    @property
    def has_failed(self) -> bool:
        return bool(self.losses)

    @property
    def next_time(self) -> float | None:
        return min((self._workers[rank].due for rank in self._in(_State.WAITING)), default=None)

    @property
    def joining(self) -> Collection[int]:
        return self._in(_State.JOINING)

    @property
    def wants_spares(self) -> bool:
        over = self._job.completed or self.counts.ended
        return not over and self._stopped is None

    @property
    def is_over(self) -> bool:
        stopped = self._job_stopped is not None or self._code is not None
        return stopped or bool(self._job.completed)

    def trained(self, rank: int) -> None:
        if self._workers[rank].state == _State.JOINING:
            self._workers[rank].state = _State.MEMBER

    def exited(self, rank: int, failure: Failure | None, now: float, stuck: str = "") -> None:
        self._running.discard(rank)
        worker = self._workers[rank]
        if failure is not None and failure.step:
            self.trained(rank)
        # A replacement that has not completed a step has no state to save, so ignore its exit code.
        if worker.state == _State.MEMBER:
            self._codes.add(0 if failure is None else failure.status or 0)
        completed = bool(self._job.completed or self.counts.completed)
        if self._stopped is not None:
            worker.state = _State.STOPPED
        elif failure is None:
            worker.state = _State.COMPLETED
        elif failure.status == PREEMPTED:
            worker.state = _State.LEFT
            self._do(restart_policy.PrintMessage(describe_leave(failure, others=self._others_run)))
        elif worker.state == _State.UNNEEDED or (worker.state == _State.JOINING and completed):
            worker.state = _State.UNNEEDED
        else:
            worker.history.append(restart_policy.Ended(failure, now - worker.since))
            reason = "the training is complete" if completed else ""
            if self._is_alone and self._in(_State.MEMBER) in ([], [rank]):
                reason = "host 0 is lost, and no other worker remains that it could join"
            if stuck:
                reason = "it is still running"
            self._decide(worker, reason, completed, now)

    def _decide(self, worker: _Worker, reason: str, completed: bool, now: float) -> None:
        """Decides whether to replace a failed worker.

        Args:
            worker: the failed worker.
            reason: a reason not to replace the worker; "" if there is none so far.
            completed: whether any worker has already completed the training.
            now: the current time.
        """
        failure = worker.history[-1].failure
        # Consider only the earlier failures of this worker. Different workers often fail in the
        # same way at the same step, for example because they have lost the same peer.
        decision = restart_policy.decide(worker.history, self._limit, at_once=True)
        if isinstance(decision, restart_policy.GiveUp) or reason:
            if isinstance(decision, restart_policy.GiveUp):
                reason = reason or decision.reason or "--max-restarts is 0"
            worker.state = _State.LOST
            self._lose(Loss(failure, f"not replaced: {reason}", final=True, late=completed))
            return
        worker.state, worker.due = _State.WAITING, now + decision.delay
        when = f"in {decision.delay:g} s" if decision.delay else "at once"
        fate = f"replaced {when} ({len(worker.history)} of {self._limit})"
        self._lose(Loss(failure, fate, final=False))

    @property
    def _is_alone(self) -> bool:
        """Whether this host is the only host that has workers, now and in the future.

        This is so if the job has two hosts and the other host, which is host 0, is lost. Lost hosts
        can rejoin a job only through host 0.
        """
        return self._host != restart_policy.HOST_0 and not self._connected and self._num_hosts == 2

    def unavailable(self, rank: int, why: str) -> None:
        self._running.discard(rank)
        worker = self._workers[rank]
        worker.state = _State.LOST
        self._lose(Loss(worker.history[-1].failure, f"not replaced: {why}", final=True))

    def _lose(self, loss: Loss) -> None:
        self.losses.append(loss)
        if not self._decides:
            self._do(restart_policy.Send("loss", loss))
        self._do(
            restart_policy.PrintMessage(
                describe_loss(loss, others=self._others_run), level=logging.ERROR
            )
        )

    @property
    def _others_run(self) -> bool:
        """Whether any worker of this host is running, or other hosts are connected."""
        return bool(self._running or self._connected)

    def signaled(self, number: signal.Signals, stop: Failure, now: float) -> None:
        """Handles a signal that asks this command to stop.

        After Ctrl-C (SIGINT), the job ends on all hosts. After other signals, it ends only on this
        host, and the other hosts continue, because a scheduler may have sent the signal to reclaim
        only this host.
        """
        gentle = number == signal.SIGINT
        if self._stopped is not None:
            self._do(restart_policy.EscalateSignal(signal.SIGKILL if gentle else signal.SIGTERM))
            return
        if gentle:
            self._job_stopped = stop
            self._do(restart_policy.Send("stop", stop))
        else:
            self._do(restart_policy.Send("leave"))
        self._end_workers(stop, signal.SIGINT if gentle else signal.SIGTERM, now)

    def _end_workers(self, why: Failure, first: signal.Signals, now: float) -> None:
        self._stopped = why
        self._move(self._in(_State.WAITING), _State.STOPPED)
        self._codes = {PREEMPTED} if self._in(_State.LEFT) else set()
        self._stop_workers(first, why, now, self._running)

    def suspended(self, ranks: Collection[int], now: float) -> None:
        self.next_look = now + _LOOK_SECONDS
        if len(ranks) == len(self._running) and not self._job.completed:
            ranks = ()
        for rank, worker in self._workers.items():
            if rank not in ranks:
                worker.suspended_since = None
                continue
            if worker.suspended_since is None:
                worker.suspended_since = now
            if (seconds := now - worker.suspended_since) < self._patience:
                continue
            worker.suspended_since = math.inf  # Do not kill the worker a second time.
            if self._job.completed:
                worker.state = _State.UNNEEDED
            text = (
                f"worker {rank} has been stopped (SIGSTOP) for {seconds:.0f} s, so the others "
                "have given it up. Killing it."
            )
            self._do(restart_policy.PrintMessage(text, level=logging.WARNING))
            self._stop_workers(signal.SIGKILL, None, now, [rank])

    def received(self, host: int, kind: str, value: object, now: float) -> None:
        if kind == "stop":
            if self._job_stopped is None:
                self._job_stopped = decode(Failure, value)
                if self._host == restart_policy.HOST_0:
                    self._do(restart_policy.Send("stop", self._job_stopped))
        elif kind == "leave":
            self._left.add(host)
            if self._host == restart_policy.HOST_0:
                self._do(
                    restart_policy.PrintMessage(
                        f"host {host} was asked to stop; the others continue without it."
                    )
                )
        elif self._host == restart_policy.HOST_0:
            if kind == "counts":
                self._counts[host] = decode(WorkerCounts, value)
                self._merge()
            elif kind == "loss":
                self.losses.append(decode(Loss, value))
        elif kind == "job":
            self._job = decode(WorkerCounts, value)
        elif kind == "addresses":
            self.addresses = decode(tuple[str, ...], value)
        elif kind == "end":
            self._code = min(max(decode(int, value), 0), 255)

    def lost(self, host: int, failure: Failure, now: float) -> None:
        self._connected.discard(host)
        self._counts[host] = self._counts[host].gone
        left = host in self._left
        over = self._job_stopped is not None or self._code is not None
        if self._host != restart_policy.HOST_0:
            self._counts = {self._host: self._counts[self._host]}
            if left or not over:
                what = f"{failure.subject} was asked to stop." if left else str(failure)
                end = "This host continues without it, and cannot admit hosts that reconnect."
                self._do(restart_policy.PrintMessage(f"{what} {end}", level=logging.WARNING))
        elif not (left or over):
            self.losses.append(Loss(failure, "the others continued without it", final=True))
            self._do(
                restart_policy.PrintMessage(
                    f"{failure} The others continue without it.", level=logging.WARNING
                )
            )
        self._merge()

    def admitted(self, hosts: Mapping[int, str], addresses: Sequence[str]) -> None:
        self._connected.update(hosts)
        self.addresses = tuple(addresses)
        self._do(restart_policy.Send("addresses", self.addresses))
        for host, address in hosts.items():
            self._left.discard(host)
            self._counts[host] = WorkerCounts(joining=1)
            self.losses = [
                replace(loss, fate="it reconnected later", final=False)
                if loss.failure.rank is None and loss.failure.host == host
                else loss
                for loss in self.losses
            ]
            self._do(
                restart_policy.PrintMessage(
                    f"host {host} ({address}) has reconnected; its workers join."
                )
            )
        self._merge()

    def advance(self, now: float) -> None:
        if self._job_stopped is not None and self._stopped is None:
            self._do(
                restart_policy.PrintMessage(
                    f"{self._job_stopped} Stopping the workers.", level=logging.WARNING
                )
            )
            self._end_workers(self._job_stopped, signal.SIGTERM, now)
        self._update()
        if self._job.completed or self._job.over:
            self._move(self._in(_State.WAITING), _State.UNNEEDED)
        # If the members have ended the training, stop the replacements that have not joined them.
        if self._job.over and self._stopped is None:
            unneeded = self._in(_State.JOINING)
            self._move(unneeded, _State.UNNEEDED)
            self._stop_workers(signal.SIGTERM, None, now, unneeded)
        for rank in self._in(_State.WAITING):
            worker = self._workers[rank]
            if worker.due <= now:
                worker.state, worker.since, worker.suspended_since = _State.JOINING, now, None
                self._running.add(rank)
                count = len(worker.history)
                self._do(restart_policy.Start(rank, f"replacement {count} of {self._limit}"))
        self._update()
        ended = not self._running and self.counts.ended
        if ended and (self._stopped is not None or self._code is not None):
            self._end()

    def _update(self) -> None:
        """Reports the numbers of this host's workers in each state, if they have changed."""
        counts = self.counts
        if self._reported and self._counts[self._host] == counts:
            return
        self._reported = True
        self._counts[self._host] = counts
        if self._decides:
            self._merge()
        else:
            self._do(restart_policy.Send("counts", counts))

    def _total(self) -> WorkerCounts:
        return sum(self._counts.values(), WorkerCounts())

    def _merge(self) -> None:
        """Adds up the numbers of all hosts, and sends the sums to the other hosts.

        If no worker is running or will start, also determines the exit code of the job. A host that
        is connected to host 0 leaves all of this to host 0.
        """
        if not self._decides:
            return
        self._job = self._total()
        self._do(restart_policy.Send("job", self._job))
        if self._job.ended and self._code is None:
            self._code = job_code(self.losses, self._job)
            self._do(restart_policy.Send("end", self._code))

    def _end(self) -> None:
        job = self._job
        if self._stopped is not None:
            failure = None
            saved = restart_policy.all_saved(self._stopped, self._codes)
            code = PREEMPTED if saved else self._stopped.code
            if not saved:
                self._do(restart_policy.PrintMessage(str(self._stopped), level=logging.WARNING))
        else:
            assert self._code is not None
            code = self._code
            failure = decisive(self.losses, completed=bool(job.completed), left=bool(job.left))
        if self.losses:
            self._do(restart_policy.PrintFailure(failure))
        text = describe_end(self.losses, code, completed=bool(job.completed))
        self._do(restart_policy.End(code, text))


def job_code(losses: Sequence[Loss], job: WorkerCounts) -> int:
    """Returns the exit code of a job in which all workers have ended without being asked to stop.

    Example:
        >>> job_code([], WorkerCounts(completed=1, left=1))
        0
    """
    failure = decisive(losses, completed=bool(job.completed), left=bool(job.left))
    if failure is not None:
        return failure.code
    return PREEMPTED if job.left and not job.completed else 0
