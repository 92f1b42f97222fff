"""The policies "none" and "all": after a failure, all workers stop, and may restart together.

A generation is a run of all workers, from their start until they have all exited. Host 0 makes the
decisions. The other hosts report their failures to host 0, which tells all hosts the failure that
came first. Then each host stops its workers, and reports to host 0 when they have exited. When all
hosts have reported, host 0 sends its verdict to all hosts: either the job has ended, or it starts
again. So the verdict is the last message of a generation. If the connection to a host closes before
the end of the job, the host counts as lost.
"""

import enum
import logging
import signal
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from tfdist._src.launch import restart_policy
from tfdist._src.launch.job.failure import (
    SAVED,
    Doubt,
    Failure,
    FirstFailure,
    decode,
    describe_failures,
    describe_restart,
    describe_success,
    lost_host,
)
from tfdist._src.launch.job.shutdown import LAST_WAIT, Grace
from tfdist._src.options import PREEMPTED

# After a doubtful failure, host 0 waits this many seconds for a failure that may have caused it.
_CAUSE_SECONDS = 1.0
# After the first failure, the other workers are stopped only after this number of seconds. Until
# then, they may fail by themselves, and record the reason.
_LAST_WORDS_SECONDS = 1.0
# After a failure, a host other than host 0 waits this number of seconds for host 0's choice of the
# first failure. Then it makes its own choice.
_HOST_0_SECONDS = 3.0
# How many seconds a host may take in addition to the grace periods of its workers until it reports
# that they have exited. Another host waits twice this time for the verdict.
_HOST_SECONDS = 30.0
_MAX_DELAY = 3600.0


@dataclass(frozen=True)
class HostEnd:
    """The report of a host that all of its workers have exited.

    Attributes:
        codes: the distinct exit codes of the host's workers. If a signal killed a worker, its code
            is the negative number of the signal.
        stuck: a text that names the workers that are still running after SIGKILL; "" if there are
            none.
        stopped: whether the host's launcher was asked to stop.
    """

    codes: tuple[int, ...]
    stuck: str = ""
    stopped: bool = False


@dataclass(frozen=True)
class RestartDecision:
    """The verdict: host 0's decision whether the job restarts after a generation has failed.

    Attributes:
        failure: the first failure of the generation.
        restart: the number of the restart that follows; 0 if there is no restart.
        limit: the maximum number of restarts.
        delay: the number of seconds until the restart.
        reason: why there is no restart, as a clause; "" if the user has not requested restarts.
        saved: whether the job was preempted and all workers have saved their state. Then there is
            no restart.
    """

    failure: Failure
    restart: int = 0
    limit: int = 0
    delay: float = 0.0
    reason: str = ""
    saved: bool = False

    def __post_init__(self) -> None:
        if self.restart < 0 or self.limit < 0 or not 0 <= self.delay <= _MAX_DELAY:
            raise ValueError("it sent an invalid verdict")


class _Phase(enum.Enum):
    RUNNING = enum.auto()
    STOPPING = enum.auto()  # The generation has failed, and this host stops its workers.
    SETTLING = enum.auto()  # The workers of this host have exited. The host waits for the verdict.
    WAITING = enum.auto()  # The verdict is a restart. The host waits until the restart is due.
    ENDED = enum.auto()


class RestartAll(restart_policy.RestartPolicy):
    """Stops all workers on all hosts after a failure, and may start them again.

    Args:
        ranks: the ranks of this host's workers.
        host: this host's number.
        hosts: the numbers of the other hosts that are connected to this host.
        grace: how long to wait between two signals when workers are stopped.
        limit: the maximum number of restarts. If the hosts have different values, the value of
            host 0 applies.
        new_secret: a function that returns the secret for the next generation; None if all
            generations use the secret that the user has set.
        now: the current time.
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
        new_secret: Callable[[], str] | None = None,
    ) -> None:
        super().__init__(ranks, host, hosts, grace)
        self._limit = limit
        self._new_secret = new_secret
        self._generation = 0
        self._history: list[restart_policy.Ended] = []
        self._lost: Failure | None = None
        self._reset()
        self._begin("", now)

    def _reset(self) -> None:
        """Forgets the reports and the verdict of the last generation."""
        # Maps the number of each host to None while its workers are running. When they have exited,
        # the value is whether all of them have succeeded. Only host 0 uses the other hosts' values.
        self._succeeded: dict[int, bool | None] = dict.fromkeys({self._host, *self._connected})
        self._ends: dict[int, HostEnd] = {}
        self._failure: Failure | None = None
        self._finished = False
        self._verdict: RestartDecision | None = None
        delay = _CAUSE_SECONDS if self._decides else _HOST_0_SECONDS
        self._first = FirstFailure(delay, decides=self._decides, patience=self._grace.preemption)
        self._codes: set[int] = set()
        self._stuck: list[str] = []
        self._stopped = False
        self._others_stopped = False

    def _begin(self, secret: str, now: float) -> None:
        self._phase = _Phase.RUNNING
        self._began = now
        self._running = set(self._ranks)
        self._do(
            restart_policy.Begin(self._generation, secret), *map(restart_policy.Start, self._ranks)
        )

    @property
    def _decides(self) -> bool:
        return self._host == restart_policy.HOST_0

    @property
    def _awaited(self) -> list[int]:
        """The hosts from which a message is still expected.

        For host 0, these are the hosts that have not reported the exit of their workers. For any
        other host, this is host 0.
        """
        return sorted(self._connected - self._ends.keys())

    @property
    def has_failed(self) -> bool:
        return bool(self._history)

    @property
    def next_time(self) -> float | None:
        if self._phase == _Phase.RUNNING:
            return self._first.deadline
        return self._deadline if self._phase in (_Phase.SETTLING, _Phase.WAITING) else None

    def exited(self, rank: int, failure: Failure | None, now: float, stuck: str = "") -> None:
        self._running.discard(rank)
        self._codes.add(0 if failure is None else failure.status or 0)
        self._stuck += [stuck] if stuck else []
        if failure is not None and self._phase == _Phase.RUNNING:
            self._first.add(failure, now)
            self._report(failure)
        if not self._running:
            succeeded = self._first.most_likely() is None
            if self._decides:
                self._host_exited(self._host, succeeded)
            else:
                self._do(restart_policy.Send("done" if succeeded else "exited"))

    def signaled(self, number: signal.Signals, stop: Failure, now: float) -> None:
        gentle = number == signal.SIGINT
        again, self._stopped = self._stopped, True
        if self._phase == _Phase.RUNNING:
            failure = self._first.most_likely()
            if failure is None or failure.doubt == Doubt.PREEMPTED:
                failure = stop
            self._report(failure)
            self._announce(failure)
            self._stop(signal.SIGINT if gentle else signal.SIGTERM, now)
        elif self._phase == _Phase.STOPPING:
            self._do(restart_policy.EscalateSignal(signal.SIGKILL if gentle else signal.SIGTERM))
        elif self._phase == _Phase.SETTLING and again:
            self._conclude(RestartDecision(self._known_failure), now)  # Stop waiting.
        else:
            self._report(stop)
            if self._phase == _Phase.WAITING:
                self._announce(stop)

    def received(self, host: int, kind: str, value: object, now: float) -> None:
        if self._decides:
            self._received_report(host, kind, value, now)
        elif kind == "stop":
            self._failure = decode(Failure, value)
        elif kind == "finish":
            self._finished = True
        elif kind == "verdict":
            self._verdict = decode(RestartDecision, value)
            if self._phase == _Phase.SETTLING:
                # Do not wait for `advance`: the next message may already begin a generation.
                self._settle(now)
        elif kind == "begin":
            beginning = decode(restart_policy.Begin, value)
            if self._phase == _Phase.WAITING and beginning.generation == self._generation:
                self._begin(beginning.secret, now)

    def _received_report(self, host: int, kind: str, value: object, now: float) -> None:
        if kind in ("done", "exited"):
            self._host_exited(host, kind == "done")
        elif kind == "end":
            self._ends[host] = decode(HostEnd, value)
            self._host_exited(host, self._succeeded[host] or False)
        elif kind == "failed":
            failure = decode(Failure, value)
            self._others_stopped |= failure.stopped
            self._add(failure, now)

    def lost(self, host: int, failure: Failure, now: float) -> None:
        self._connected.discard(host)
        self._lost = self._lost or failure
        succeeded = self._succeeded[host] = self._succeeded[host] or False
        if self._finished or self._failure is not None:
            return
        if not self._decides:
            self._failure = failure
        elif not succeeded:
            self._add(failure, now)

    def _add(self, failure: Failure, now: float) -> None:
        """On host 0, handles the failure of another host or of its workers."""
        if self._phase == _Phase.WAITING:
            self._announce(failure)
        else:
            self._first.add(failure, now)

    def _report(self, failure: Failure) -> None:
        """Reports a failure on this host to host 0, unless this host is host 0."""
        if not self._decides:
            self._do(restart_policy.Send("failed", failure))

    def _announce(self, failure: Failure) -> None:
        """Ends the generation because of a failure; on host 0, also tells the other hosts."""
        self._failure = failure
        if self._decides:
            self._do(restart_policy.Send("stop", failure))

    def _host_exited(self, host: int, succeeded: bool) -> None:
        """Records on host 0 that all workers of a host have exited.

        If the workers of all hosts have succeeded, the job is complete.
        """
        self._succeeded[host] = succeeded
        if all(self._succeeded.values()) and self._failure is None:
            self._finished = True
            self._do(restart_policy.Send("finish"))

    def advance(self, now: float) -> None:
        if self._phase == _Phase.RUNNING:
            self._choose_failure(now)
        if self._phase == _Phase.STOPPING and not self._running:
            self._await_verdict(now)
        elif self._phase == _Phase.SETTLING:
            self._settle(now)
        elif self._phase == _Phase.WAITING:
            self._wait(now)
        elif self._phase == _Phase.RUNNING and not self._running and self._finished:
            self._end(0, describe_success(self._failures))

    def _choose_failure(self, now: float) -> None:
        """Begins to stop the workers if the first failure of the generation has been chosen."""
        if self._failure is None:
            failure = self._first.decided(now)
            exited = self._decides and None not in self._succeeded.values()
            alone = not self._connected or exited
            if failure is None and not self._running and alone:
                # No clearer failure can follow, because no worker is running any more.
                failure = self._first.most_likely()
            if failure is None:
                return
            self._announce(failure)
        failure = self._known_failure
        if self._running:
            self._do(
                restart_policy.PrintMessage(
                    f"{failure} Stopping the other workers.", level=logging.ERROR
                )
            )
        self._stop(signal.SIGTERM, now + (0.0 if failure.stopped else _LAST_WORDS_SECONDS))

    @property
    def _known_failure(self) -> Failure:
        assert self._failure is not None
        return self._failure

    def _stop(self, first: signal.Signals, at: float) -> None:
        self._phase = _Phase.STOPPING
        self._stop_workers(first, self._failure, at, self._running)

    def _await_verdict(self, now: float) -> None:
        """Begins to wait until all hosts' workers have exited and host 0 has sent its verdict."""
        self._phase = _Phase.SETTLING
        self._seconds = now - self._began
        patience = 2 * max(self._grace.failure, self._grace.preemption) + LAST_WAIT
        self._deadline = now + patience + (1 if self._decides else 2) * _HOST_SECONDS
        stuck = f"worker {', '.join(self._stuck)}" if self._stuck else ""
        end = HostEnd(tuple(sorted(self._codes)), stuck, self._stopped)
        if self._decides:
            self._ends[self._host] = end
        else:
            self._do(restart_policy.Send("end", end))
        self._settle(now)

    def _settle(self, now: float) -> None:
        """Follows the verdict of host 0, if it has arrived.

        On host 0, makes the verdict if all hosts have reported the exit of their workers. After the
        deadline, a host no longer waits for missing messages.
        """
        if self._verdict is None and self._awaited and now < self._deadline:
            return
        if self._verdict is not None:
            # Host 0 may have decided to restart before it was informed that a signal has asked this
            # host's launcher to stop.
            restart = 0 if self._stopped else self._verdict.restart
            verdict = replace(self._verdict, restart=restart)
        elif self._decides:
            verdict = self._decide()
            self._do(restart_policy.Send("verdict", verdict))
        else:
            # Host 0 is lost, or does not answer.
            verdict = RestartDecision(self._known_failure)
        self._conclude(verdict, now)

    def _decide(self) -> RestartDecision:
        """Makes the verdict on host 0."""
        failure, ends = self._known_failure, self._ends.values()
        missing = self._lost or next((lost_host(host, "") for host in self._awaited), None)
        if missing is None and restart_policy.all_saved(
            failure, [code for end in ends for code in end.codes]
        ):
            return RestartDecision(failure, saved=True)
        if failure.preemption and not failure.stopped:
            event = f"{failure.event}, the other workers did not"
            failure = replace(failure, event=event, code=1, status=1)
        history = [*self._history, restart_policy.Ended(failure, self._seconds)]
        decision = restart_policy.decide(history, self._limit)
        if isinstance(decision, restart_policy.GiveUp):
            return RestartDecision(failure, reason=decision.reason)
        if stuck := next((end.stuck for end in ends if end.stuck), ""):
            return RestartDecision(failure, reason=f"{stuck} is still running")
        if missing is not None:
            return RestartDecision(failure, reason=f"{missing.subject} is gone")
        if self._stopped or self._others_stopped or any(end.stopped for end in ends):
            return RestartDecision(failure, reason="a launcher was asked to stop")
        return RestartDecision(failure, len(history), self._limit, decision.delay)

    def _conclude(self, verdict: RestartDecision, now: float) -> None:
        """Follows a verdict: ends the job, or begins to wait for the restart."""
        if verdict.saved:
            self._end(PREEMPTED, f"The workers {SAVED}")
            return
        failure = verdict.failure
        self._history.append(restart_policy.Ended(failure, self._seconds))
        self._do(restart_policy.PrintFailure(failure))
        if not verdict.restart:
            self._end(failure.code, describe_failures(self._failures, verdict.reason))
            return
        text = describe_restart(verdict.restart, verdict.limit, verdict.delay, failure)
        self._do(restart_policy.PrintMessage(text, below_output=False, level=logging.WARNING))
        self._phase = _Phase.WAITING
        self._generation += 1
        self._deadline = now + verdict.delay + (0 if self._decides else _HOST_SECONDS)
        self._reset()

    def _wait(self, now: float) -> None:
        """Begins the next generation when it is due, or ends the job if it was asked to stop."""
        if self._failure is None and now >= self._deadline:
            if self._decides:
                secret = self._new_secret() if self._new_secret is not None else ""
                self._do(
                    restart_policy.Send("begin", restart_policy.Begin(self._generation, secret))
                )
                self._begin(secret, now)
                return
            self._failure = lost_host(restart_policy.HOST_0, "no answer")
        if stop := self._failure:
            self._do(
                restart_policy.PrintMessage(str(stop), below_output=False, level=logging.ERROR)
            )
            self._end(stop.code, describe_failures([*self._failures, stop], ""))

    @property
    def _failures(self) -> list[Failure]:
        """The first failure of each failed generation."""
        return [ended.failure for ended in self._history]

    def _end(self, code: int, summary: str) -> None:
        self._phase = _Phase.ENDED
        self._do(restart_policy.End(code, summary))
