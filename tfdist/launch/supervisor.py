"""The event loop of one generation: starts this host's workers, supervises them until they exit."""

from __future__ import annotations

import math
import select
import signal
import time
from collections.abc import Mapping, Sequence

from tfdist.launch.console import say
from tfdist.launch.hosts.host_group import HostGroup
from tfdist.launch.hosts.verdict import HostEnd
from tfdist.launch.job.failure import Doubt, Failure, FirstFailure, stopped_by, worker_failure
from tfdist.launch.job.log_routing import Output
from tfdist.launch.job.plan import WorkerPlan
from tfdist.launch.job.progress import VARIABLE, ProgressMemory
from tfdist.launch.job.readable import readable
from tfdist.launch.job.shutdown import Grace, SignalEscalation
from tfdist.launch.job.signals import Signals
from tfdist.launch.job.watchdog import Watchdog
from tfdist.launch.job.worker import WorkerProcess

# How long a failure that may be the consequence of another one waits for that one.
_CAUSE_SECONDS = 1.0
# How long the others may take to fail of themselves, and write down why, before they are stopped.
_LAST_WORDS_SECONDS = 1.0
# How long a host other than host 0 waits for host 0's decision.
_HOST_0_SECONDS = 3.0


class Supervisor:
    """Runs the workers of one host, once.

    Args:
        plans: the workers to start.
        environment: the environment that the workers inherit.
        output: where their output goes.
        hosts: the other hosts.
        host: this host's number.
        watchdog: kills the workers if this process dies.
        grace: seconds from one signal to the next, harder one.
        signals: those that this process receives.
    """

    def __init__(
        self,
        *,
        plans: Sequence[WorkerPlan],
        environment: Mapping[str, str],
        output: Output,
        hosts: HostGroup,
        host: int,
        watchdog: Watchdog,
        grace: Grace,
        signals: Signals,
    ) -> None:
        self._plans = plans
        self._environment = environment
        self._output = output
        self._hosts = hosts
        self._host = host
        self._watchdog = watchdog
        self._grace = grace
        self._signals = signals
        self._running: dict[int, WorkerProcess] = {}
        self._progress: dict[int, ProgressMemory] = {}
        self._codes: set[int] = set()
        self._stuck = ""
        self._stopped = False
        delay = _CAUSE_SECONDS if hosts.decides else _HOST_0_SECONDS
        self._first = FirstFailure(delay, decides=hosts.decides, patience=grace.preemption)
        self._escalation: SignalEscalation | None = None
        self._reported_exit = False

    def run(self) -> tuple[Failure | None, HostEnd]:
        """Starts the workers and returns when all have exited.

        Returns:
            The failure that ended the generation, None if all workers of all hosts succeeded; and
            how it ended on this host.

        Raises:
            LaunchError: a worker cannot be started.
        """
        try:
            for plan in self._plans:
                self._start(plan)
            while not self._finished():
                self._wait()
                now = time.monotonic()
                for number in self._signals.take():
                    self._handle_signal(number, now)
                self._read(now)
                self._reap(now)
                self._decide(now)
                self._send_signal(now)
        finally:
            for worker in self._running.values():
                worker.signal(signal.SIGKILL)
            for memory in self._progress.values():
                memory.take()
        end = HostEnd(tuple(sorted(self._codes)), self._stuck, self._stopped)
        return self._hosts.failure, end

    def _start(self, plan: WorkerPlan) -> None:
        self._progress[plan.rank] = memory = ProgressMemory()
        environment = {**self._environment, VARIABLE: memory.path}
        with self._output.streams(plan.rank) as streams:
            self._running[plan.rank] = WorkerProcess(plan, environment, streams, self._watchdog)

    def _finished(self) -> bool:
        if not self._running:
            return self._escalation is not None or self._hosts.finished
        if self._escalation is not None and self._escalation.exhausted(time.monotonic()):
            stuck = ", ".join(f"{rank} (pid {w.pid})" for rank, w in self._running.items())
            self._stuck = f"worker {stuck}"
            say(f"still running after SIGKILL: {self._stuck}; giving up")
            return True
        return False

    def _wait(self) -> None:
        """Sleeps until something happens or is due."""
        poll = select.poll()
        poll.register(self._signals, select.POLLIN)
        self._output.register(poll)
        for channel in self._hosts.channels().values():
            poll.register(channel, select.POLLIN)
        due = self._first.deadline if self._escalation is None else self._escalation.next_time
        poll.poll(None if due is None else max(0, math.ceil((due - time.monotonic()) * 1000)))

    def _handle_signal(self, number: signal.Signals, now: float) -> None:
        """Stops the workers because this process received a signal."""
        self._stopped = True
        gentle = number == signal.SIGINT
        if self._escalation is not None:
            self._escalation.harden(signal.SIGKILL if gentle else signal.SIGTERM, now)
            return
        failure = self._first.most_likely()
        if failure is None or failure.doubt == Doubt.PREEMPTED:
            failure = stopped_by(self._host, number)
        self._hosts.report(failure)
        self._hosts.announce(failure)
        self._escalate(signal.SIGINT if gentle else signal.SIGTERM, now)

    def _read(self, now: float) -> None:
        for rank in readable(self._output.pipes()):
            self._output.copy(rank)
        for host in readable({host: c.fileno() for host, c in self._hosts.channels().items()}):
            failure = self._hosts.receive(host)
            if failure is not None:
                self._first.add(failure, now)

    def _reap(self, now: float) -> None:
        """Handles the workers that have exited."""
        for rank, worker in list(self._running.items()):
            status = worker.exit_code()
            if status is None:
                continue
            del self._running[rank]
            self._output.finish(rank)
            self._codes.add(status)
            progress = self._progress.pop(rank).take()
            if status != 0 and self._escalation is None:
                failure = worker_failure(
                    host=self._host,
                    rank=rank,
                    status=status,
                    tail=self._output.tail(rank),
                    log="" if self._output.inherited(rank) else str(self._output.log(rank)),
                    progress=progress,
                    time=time.time(),
                )
                self._first.add(failure, now)
                self._hosts.report(failure)
        if not self._running and not self._reported_exit:
            self._reported_exit = True
            if self._first.most_likely() is None:
                self._hosts.done()
            else:
                self._hosts.exited()

    def _decide(self, now: float) -> None:
        """Begins to stop the workers once the first failure is known."""
        if self._escalation is not None:
            return
        if self._hosts.failure is None:
            failure = self._first.decided(now)
            alone = not self._hosts.channels() or self._hosts.all_exited
            if failure is None and not self._running and alone:
                failure = self._first.most_likely()  # No clearer one can follow.
            if failure is None:
                return
            self._hosts.announce(failure)
        assert self._hosts.failure is not None
        if self._running:
            say(f"{self._hosts.failure} Stopping the other workers.", below_output=True)
        last_words = 0.0 if self._hosts.failure.stopped else _LAST_WORDS_SECONDS
        self._escalate(signal.SIGTERM, now + last_words)

    def _escalate(self, first: signal.Signals, start: float) -> None:
        failure = self._hosts.failure
        saves = failure is not None and failure.preemption
        grace = self._grace.preemption if saves else self._grace.failure
        self._escalation = SignalEscalation(first, grace, start)

    def _send_signal(self, now: float) -> None:
        number = self._escalation.due(now) if self._escalation is not None else None
        if number is not None:
            for worker in self._running.values():
                worker.signal(number)
