"""The event loop of an elastic job on one host: a worker that fails is replaced."""

from __future__ import annotations

import math
import select
import signal
import time
from collections.abc import Callable, Mapping, Sequence

from tfdist.errors import LaunchError
from tfdist.exit_codes import PREEMPTED
from tfdist.launch.console import say
from tfdist.launch.elastic.outcome import ElasticOutcome
from tfdist.launch.elastic.paused_workers import PausedWorkers
from tfdist.launch.elastic.report import describe_leave, describe_loss, mark
from tfdist.launch.elastic.spares import Spares
from tfdist.launch.elastic.worker_states import State, WorkerStates
from tfdist.launch.hosts.elastic_hosts import ElasticHosts
from tfdist.launch.job.failure import Failure, stopped_by, worker_failure
from tfdist.launch.job.log_routing import Output
from tfdist.launch.job.plan import WorkerPlan
from tfdist.launch.job.progress import VARIABLE, ProgressMemory
from tfdist.launch.job.readable import readable
from tfdist.launch.job.restarts import all_saved
from tfdist.launch.job.shutdown import Grace, SignalEscalation
from tfdist.launch.job.signals import Signals
from tfdist.launch.job.watchdog import Watchdog
from tfdist.launch.job.worker import WorkerProcess

# How often what strangers have begun is looked at, while there is something.
_BUSY_SECONDS = 0.5


class ElasticSupervisor:
    """Runs the workers of one host until the job has ended.

    Args:
        plan: makes the plans of this host's workers from the addresses of all; None for those
            that are known so far.
        environment: the environment that the workers inherit.
        output: where their output goes.
        hosts: the other hosts.
        host: this host's number.
        watchdog: kills the workers if this process dies.
        grace: seconds from one signal to the next, harder one.
        limit: how many replacements each worker may have.
        spares: processes that become replacements.
        paused: ends workers that are stopped.
        joining: whether the job runs already, and this host has come again.
    """

    def __init__(
        self,
        *,
        plan: Callable[[Sequence[str] | None], Sequence[WorkerPlan]],
        environment: Mapping[str, str],
        output: Output,
        hosts: ElasticHosts,
        host: int,
        watchdog: Watchdog,
        grace: Grace,
        limit: int,
        spares: Spares,
        paused: PausedWorkers,
        joining: bool = False,
    ) -> None:
        self._plan = plan
        self._environment = environment
        self._output = output
        self._hosts = hosts
        self._host = host
        self._watchdog = watchdog
        self._grace = grace
        self._limit = limit
        self._spares, self._paused = spares, paused
        ranks = [worker.rank for worker in plan(None)]
        self._states = WorkerStates(ranks, limit, time.monotonic(), joining=joining)
        self._running: dict[int, WorkerProcess] = {}
        self._progress: dict[int, ProgressMemory] = {}
        self._stopping: dict[int, SignalEscalation] = {}
        self._stopped: Failure | None = None
        self._codes: set[int] = set()

    def run(self) -> ElasticOutcome:
        """Starts the workers and returns when the job has ended.

        Raises:
            LaunchError: a worker cannot be started at the beginning.
        """
        with Signals() as signals:
            try:
                for rank in self._states.of(State.MEMBER, State.JOINING):
                    self._start(rank)
                self._hosts.update(self._states.counts)
                self._tend_spares()
                while not self._finished():
                    self._wait(signals)
                    now = time.monotonic()
                    for number in signals.take():
                        self._handle_signal(number, now)
                    self._read()
                    self._reap(now)
                    self._follow(now)
                    self._send_signals(now)
                    self._paused.end(self._running, self._states, self._hosts.job, now)
            finally:
                for worker in self._running.values():
                    worker.signal(signal.SIGKILL)
                for memory in self._progress.values():
                    memory.take()
                self._spares.close()
        return self._outcome()

    def _start(self, rank: int, line: str = "") -> None:
        """Starts a worker; with a line for its log, as a replacement."""
        plan = next(p for p in self._plan(self._hosts.addresses or None) if p.rank == rank)
        self._progress[rank] = memory = ProgressMemory()
        environment = {**self._environment, VARIABLE: memory.path}
        with self._output.streams(rank, line) as streams:
            spare = self._spares.take() if line else None
            if spare is not None:
                try:
                    everything = {**environment, **plan.settings}
                    self._running[rank] = spare.become(everything, streams)
                    return
                except OSError:
                    spare.process.end()  # It has just died.
                    spare.close()
            self._running[rank] = WorkerProcess(plan, environment, streams, self._watchdog)

    def _finished(self) -> bool:
        now = time.monotonic()
        stuck = [
            f"{rank} (pid {self._running[rank].pid})"
            for rank, escalation in self._stopping.items()
            if rank in self._running and escalation.exhausted(now)
        ]
        if stuck:
            say(f"still running after SIGKILL: worker {', '.join(stuck)}; giving up")
            for rank in [rank for rank in self._stopping if self._running.pop(rank, None)]:
                self._states.given_up(rank)
                self._codes.add(-signal.SIGKILL)
        if self._running or not self._states.counts.ended:
            return False
        return self._stopped is not None or self._hosts.code is not None

    def _wait(self, signals: Signals) -> None:
        """Sleeps until something happens or is due."""
        poll = select.poll()
        poll.register(signals, select.POLLIN)
        self._output.register(poll)
        for descriptor in self._hosts.descriptors():
            poll.register(descriptor, select.POLLIN)
        times = [
            self._paused.next_time,
            self._states.next_time,
            *(e.next_time for e in self._stopping.values()),
            time.monotonic() + _BUSY_SECONDS if self._hosts.is_busy else None,
        ]
        due = min((at for at in times if at is not None), default=None)
        poll.poll(None if due is None else max(0, math.ceil((due - time.monotonic()) * 1000)))

    def _handle_signal(self, number: signal.Signals, now: float) -> None:
        """Stops the workers because this process received a signal.

        Ctrl-C ends the job on all hosts; any other signal is for this host, as from a scheduler
        that needs it, and the others go on.
        """
        gentle = number == signal.SIGINT
        if self._stopped is not None:
            for escalation in self._stopping.values():
                escalation.harden(signal.SIGKILL if gentle else signal.SIGTERM, now)
            return
        self._stopped = stopped_by(self._host, number)
        if gentle:
            self._hosts.stop_all(self._stopped)
        else:
            self._hosts.leave()
        self._stop(signal.SIGINT if gentle else signal.SIGTERM, now)

    def _stop(self, first: signal.Signals, now: float) -> None:
        assert self._stopped is not None
        grace = self._grace.preemption if self._stopped.preemption else self._grace.failure
        self._states.stop()
        self._codes = {PREEMPTED} if self._states.of(State.LEFT) else set()
        for rank in self._running:
            self._stopping[rank] = SignalEscalation(first, grace, now)

    def _read(self) -> None:
        for rank in readable(self._output.pipes()):
            self._output.copy(rank)
        for host in readable(self._hosts.channels()):
            self._hosts.receive(host)
        self._hosts.admit()
        self._hosts.testify()

    def _reap(self, now: float) -> None:
        """Handles the workers that have exited."""
        for rank, worker in list(self._running.items()):
            status = worker.exit_code()
            if status is None:
                continue
            del self._running[rank]
            self._stopping.pop(rank, None)
            self._output.finish(rank)
            progress = self._progress.pop(rank).take()
            if progress.steps:
                self._states.trains(rank)
            if rank in self._states.of(State.MEMBER):
                self._codes.add(status)  # One that never joined has nothing to save.
            failure = None
            if status != 0:
                failure = worker_failure(
                    host=self._host,
                    rank=rank,
                    status=status,
                    tail=self._output.tail(rank),
                    log="" if self._output.inherited(rank) else str(self._output.log(rank)),
                    progress=progress,
                    time=time.time(),
                )
            loss = self._states.ended(rank, failure, self._hosts.job, now, alone=self._hosts.alone)
            if loss is not None:
                self._hosts.lose(loss)
                say(describe_loss(loss, others=self._others()), below_output=True)
            elif failure is not None and rank in self._states.of(State.LEFT):
                say(describe_leave(failure, others=self._others()), below_output=True)

    def _others(self) -> bool:
        """Whether any worker is running, on this host or elsewhere."""
        return bool(self._running) or bool(self._hosts.channels())

    def _follow(self, now: float) -> None:
        """Does what the news ask for: starts replacements, and stops those without a use."""
        for line in self._hosts.news():
            say(line, below_output=True)
        if self._hosts.stop is not None and self._stopped is None:
            self._stopped = self._hosts.stop
            say(f"{self._stopped} Stopping the workers.", below_output=True)
            self._stop(signal.SIGTERM, now)
        for rank in self._states.of(State.JOINING):
            if rank in self._progress and self._progress[rank].read().steps:
                self._states.trains(rank)
        self._hosts.update(self._states.counts)
        for rank in self._states.heed(self._hosts.job):
            if rank in self._running:
                escalation = SignalEscalation(signal.SIGTERM, self._grace.failure, now)
                self._stopping.setdefault(rank, escalation)
        for rank in self._states.due(now):
            self._replace(rank, now)
        self._hosts.update(self._states.counts)
        self._tend_spares()

    def _replace(self, rank: int, now: float) -> None:
        try:
            self._start(rank, mark(rank, self._states.number(rank), self._limit))
        except LaunchError as error:
            if memory := self._progress.pop(rank, None):
                memory.take()
            self._output.finish(rank)
            loss = self._states.unavailable(rank, str(error))
            self._hosts.lose(loss)
            say(describe_loss(loss, others=self._others()), below_output=True)
        else:
            self._states.started(rank, now)

    def _tend_spares(self) -> None:
        over = self._hosts.job.completed or self._states.counts.ended
        if self._stopped is not None or over:
            self._spares.close()
        elif problem := self._spares.tend():
            say(problem, below_output=True)

    def _send_signals(self, now: float) -> None:
        for rank, escalation in self._stopping.items():
            number = escalation.due(now)
            if number is not None and rank in self._running:
                self._running[rank].signal(number)

    def _outcome(self) -> ElasticOutcome:
        losses, job = self._hosts.losses, self._hosts.job
        if self._stopped is not None:
            saved = all_saved(self._stopped, self._codes)
            code = PREEMPTED if saved else self._stopped.code
        else:
            assert self._hosts.code is not None
            code = self._hosts.code
        return ElasticOutcome(code, tuple(losses), job, self._stopped)
