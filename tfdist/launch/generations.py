"""The generations of a job: each runs all workers once, and after a failure the next may follow."""

from __future__ import annotations

import math
import select
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tfdist.cluster.auth.hmac_challenge import VARIABLE as SECRET
from tfdist.launch.console import say
from tfdist.launch.hosts.host_group import HostGroup
from tfdist.launch.hosts.verdict import Beginning, HostEnd, Verdict
from tfdist.launch.job.failure import Failure, lost_host, stopped_by
from tfdist.launch.job.log_routing import Output
from tfdist.launch.job.plan import WorkerPlan
from tfdist.launch.job.report import describe, describe_restart
from tfdist.launch.job.restarts import End, Ended, all_saved, decide
from tfdist.launch.job.shutdown import LAST_WAIT, Grace
from tfdist.launch.job.signals import Signals
from tfdist.launch.job.watchdog import Watchdog
from tfdist.launch.supervisor import Supervisor

_GENERATION = "TFDIST_GENERATION"
_FLIGHT_DIR = "TFDIST_FLIGHT_DIR"
# How much longer than its workers may take a host is waited for.
_HOST_SECONDS = 30.0
# A file's time may be a little before the clock's.
_CLOCK_SECONDS = 1.0


@dataclass(frozen=True)
class Outcome:
    """How the job has ended.

    Attributes:
        failures: the first failure of each generation that failed, in order; the last is that of
            the job unless `succeeded`.
        succeeded: whether all workers have succeeded in the end.
        saved: whether the job was preempted, and all workers have saved their state.
        reason: why the job is not started again; "" if nobody asked for that.
    """

    failures: tuple[Failure, ...]
    succeeded: bool = False
    saved: bool = False
    reason: str = ""


class Generations:
    """Runs the workers of this host until they succeed or starting them again is of no use.

    Args:
        plans: the workers to start.
        environment: the environment that the workers inherit.
        output: where their output goes.
        flight_dir: where their flight logs go.
        hosts: the other hosts.
        host: this host's number.
        watchdog: kills the workers if this process dies.
        grace: seconds from one signal to the next, harder one.
        max_restarts: how often the job may be started again; that of host 0 counts.
        new_secret: makes the secret of the next generation; None to keep the user's.
    """

    def __init__(
        self,
        *,
        plans: Sequence[WorkerPlan],
        environment: Mapping[str, str],
        output: Output,
        flight_dir: Path,
        hosts: HostGroup,
        host: int,
        watchdog: Watchdog,
        grace: Grace,
        max_restarts: int,
        new_secret: Callable[[], str] | None,
    ) -> None:
        self._plans = plans
        self._environment = dict(environment)
        self._output = output
        self._flight_dir = flight_dir
        self._hosts = hosts
        self._host = host
        self._watchdog = watchdog
        self._grace = grace
        self._max_restarts = max_restarts
        self._new_secret = new_secret
        self._history: list[Ended] = []

    def run(self) -> Outcome:
        """Runs the job.

        Raises:
            LaunchError: a worker cannot be started.
        """
        generation = 0
        with Signals() as signals:
            while True:
                began, start = time.monotonic(), time.time()
                failure, end = self._generation(generation, signals)
                if failure is None:
                    return Outcome(self.failures, succeeded=True)
                verdict = self._settle(failure, end, time.monotonic() - began, signals)
                if verdict.saved:
                    return Outcome((*self.failures, verdict.failure), saved=True)
                self._history.append(Ended(verdict.failure, time.monotonic() - began))
                self._show(verdict, generation, start)
                if not verdict.restart:
                    return Outcome(self.failures, reason=verdict.reason)
                generation += 1
                if stop := self._back_off(verdict.delay, generation, signals):
                    say(str(stop))
                    return Outcome((*self.failures, stop))

    @property
    def failures(self) -> tuple[Failure, ...]:
        """The first failure of each generation that has failed so far."""
        return tuple(ended.failure for ended in self._history)

    def _generation(self, number: int, signals: Signals) -> tuple[Failure | None, HostEnd]:
        self._output.begin(number)
        settings = {
            _GENERATION: str(number),
            _FLIGHT_DIR: str(self._output.of_generation(self._flight_dir, number)),
        }
        if secret := self._hosts.beginning.secret:
            settings[SECRET] = secret
        return Supervisor(
            plans=self._plans,
            environment={**self._environment, **settings},
            output=self._output,
            hosts=self._hosts,
            host=self._host,
            watchdog=self._watchdog,
            grace=self._grace,
            signals=signals,
        ).run()

    def _settle(self, failure: Failure, end: HostEnd, seconds: float, signals: Signals) -> Verdict:
        """Waits until the workers of all hosts are gone, and for what host 0 decides then."""
        hosts = self._hosts
        hosts.end(end)
        patience = 2 * max(self._grace.failure, self._grace.preemption) + LAST_WAIT + _HOST_SECONDS
        deadline = time.monotonic() + patience + (0 if hosts.decides else _HOST_SECONDS)
        stopped = end.stopped
        verdict = None
        while verdict is None and hosts.awaited and time.monotonic() < deadline:
            for number in self._wait(signals, deadline):
                if stopped:
                    return Verdict(failure)  # The second time: no waiting.
                stopped = True
                hosts.report(stopped_by(self._host, number))
            self._receive()
            verdict = hosts.take_verdict()
        if verdict is not None:
            # Host 0 may have decided before it heard of the signal.
            return replace(verdict, restart=0) if stopped else verdict
        if not hosts.decides:
            return Verdict(failure)  # Host 0 is gone, or does not answer.
        verdict = self._verdict(failure, seconds, stopped)
        hosts.decide(verdict)
        return verdict

    def _verdict(self, failure: Failure, seconds: float, stopped: bool) -> Verdict:
        """Decides, on host 0."""
        hosts, ends = self._hosts, self._hosts.ends
        missing = hosts.lost or next((lost_host(host, "") for host in hosts.awaited), None)
        if missing is None and all_saved(failure, [c for end in ends.values() for c in end.codes]):
            return Verdict(failure, saved=True)
        if failure.preemption and not failure.stopped:
            failure = replace(
                failure, event=f"{failure.event}, the other workers did not", code=1, status=1
            )
        history = [*self._history, Ended(failure, seconds)]
        decision = decide(history, self._max_restarts)
        if isinstance(decision, End):
            return Verdict(failure, reason=decision.reason)
        stuck = next((end.stuck for end in ends.values() if end.stuck), "")
        if stuck:
            return Verdict(failure, reason=f"{stuck} is still running")
        if missing is not None:
            return Verdict(failure, reason=f"{missing.subject} is gone")
        if stopped or hosts.stopped or any(end.stopped for end in ends.values()):
            return Verdict(failure, reason="a launcher was told to stop")
        return Verdict(failure, len(history), self._max_restarts, decision.delay)

    def _back_off(self, delay: float, generation: int, signals: Signals) -> Failure | None:
        """Waits until the next generation begins.

        Returns:
            Why it does not; None once it does.
        """
        hosts = self._hosts
        begin = time.monotonic() + delay
        deadline = begin if hosts.decides else begin + _HOST_SECONDS
        while hosts.failure is None and hosts.beginning.generation < generation:
            if time.monotonic() >= deadline:
                if hosts.decides:
                    secret = self._new_secret() if self._new_secret is not None else ""
                    hosts.begin(Beginning(generation, secret))
                    return None
                hosts.failure = lost_host(0, "no answer")
                break
            for number in self._wait(signals, deadline):
                failure = stopped_by(self._host, number)
                hosts.report(failure)
                hosts.announce(failure)
            for failure in self._receive():
                hosts.announce(failure)
        # A failure that comes with the beginning belongs to the new generation.
        return hosts.failure if hosts.beginning.generation < generation else None

    def _wait(self, signals: Signals, deadline: float) -> list[signal.Signals]:
        """Sleeps until something happens; returns the signals that ask this process to stop."""
        poll = select.poll()
        poll.register(signals, select.POLLIN)
        for channel in self._hosts.channels().values():
            poll.register(channel, select.POLLIN)
        poll.poll(max(0, math.ceil((deadline - time.monotonic()) * 1000)))
        return signals.take()

    def _receive(self) -> list[Failure]:
        """Reads from the other hosts; returns what they report to host 0."""
        reported = []
        for host, channel in self._hosts.channels().items():
            poll = select.poll()
            poll.register(channel, select.POLLIN)
            if poll.poll(0):
                reported.append(self._hosts.receive(host))
        return [failure for failure in reported if failure is not None]

    def _show(self, verdict: Verdict, generation: int, start: float) -> None:
        """Prints what failed, where its logs are, and when the job is started again."""
        log_dir = self._output.written()
        say(describe(verdict.failure, self._host, log_dir), below_output=True)
        flight_dir = self._output.of_generation(self._flight_dir, generation)
        logs = flight_dir.glob("flight-*.json")
        if any(log.stat().st_mtime > start - _CLOCK_SECONDS for log in logs):
            say(f"What each worker was doing: tfdist doctor --flight {flight_dir}")
        if verdict.restart:
            say(describe_restart(verdict.restart, verdict.limit, verdict.delay, verdict.failure))
