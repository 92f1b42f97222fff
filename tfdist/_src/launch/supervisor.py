"""The event loop of the launcher, which runs the workers of one host."""

import math
import select
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from tfdist._src.launch import restart_policy
from tfdist._src.launch.console import BELOW_OUTPUT, logger
from tfdist._src.launch.hosts.newcomers import ChannelError
from tfdist._src.launch.hosts.rendezvous import OtherHosts
from tfdist._src.launch.job.failure import (
    Failure,
    describe,
    lost_host,
    mark,
    stopped_by,
    worker_failure,
)
from tfdist._src.launch.job.log_routing import Output
from tfdist._src.launch.job.shutdown import SignalEscalation, Signals
from tfdist._src.launch.job.spares import Spares
from tfdist._src.launch.job.worker import ProgressMemory, Watchdog, WorkerPlan, WorkerProcess
from tfdist._src.options import InternalVariable, Variable
from tfdist.errors import LaunchError

# While there are unauthenticated connections, the supervisor checks them at this interval.
_BUSY_SECONDS = 0.5
# A new file's modification time may be slightly earlier than the current time.
_CLOCK_SECONDS = 1.0


class Supervisor:
    """Runs the workers of one host until the restart policy ends the command.

    Args:
        policy: decides how to react to events, such as the failure of a worker.
        plan: a function that returns the plans of this host's workers. Its argument is the sequence
            of the addresses of all workers; empty if they have not changed since the start.
        environment: the environment that the workers inherit.
        output: routes the workers' output.
        flight_dir: the folder in which the workers write their flight logs.
        hosts: the connections to the other hosts.
        host: this host's number.
        watchdog: kills the workers if this process dies.
        spares: the warm spares that can become replacements.
    """

    def __init__(
        self,
        *,
        policy: restart_policy.RestartPolicy,
        plan: Callable[[Sequence[str]], Sequence[WorkerPlan]],
        environment: Mapping[str, str],
        output: Output,
        flight_dir: Path,
        hosts: OtherHosts,
        host: int,
        watchdog: Watchdog,
        spares: Spares,
    ) -> None:
        self._policy = policy
        self._plan = plan
        self._environment = dict(environment)
        self._output = output
        self._flight_dir = flight_dir
        self._hosts = hosts
        self._host = host
        self._watchdog = watchdog
        self._spares = spares
        self._generation = 0
        self._began = time.time()
        self._running: dict[int, WorkerProcess] = {}
        self._progress: dict[int, ProgressMemory] = {}
        self._stopping: dict[int, SignalEscalation] = {}
        self._end: restart_policy.End | None = None

    def run(self) -> restart_policy.End:
        """Starts the workers and returns when the policy ends the command.

        Raises:
            LaunchError: a worker cannot be started, and is not a replacement.
        """
        with Signals() as signals:
            try:
                self._execute(time.monotonic())
                while self._end is None:
                    self._wait(signals)
                    now = time.monotonic()
                    for number in signals.take():
                        self._policy.signaled(number, stopped_by(self._host, number), now)
                    self._read(now)
                    self._reap(now)
                    self._look(now)
                    self._policy.advance(now)
                    self._execute(now)
                    self._send_signals(now)
            finally:
                for worker in self._running.values():
                    worker.signal(signal.SIGKILL)
                for memory in self._progress.values():
                    memory.take()
                self._spares.close()
        return self._end

    def _execute(self, now: float) -> None:
        """Executes the policy's actions, and starts or ends spares as the policy needs them."""
        while actions := self._policy.take():
            for action in actions:
                self._act(action, now)
        if not self._policy.wants_spares:
            self._spares.close()
        elif problem := self._spares.tend():
            logger.warning(problem, extra=BELOW_OUTPUT)

    def _act(self, action: restart_policy.Action, now: float) -> None:
        match action:
            case restart_policy.Begin():
                self._begin(action)
            case restart_policy.Start():
                self._start(action, now)
            case restart_policy.Stop():
                for rank in self._running.keys() & set(action.ranks):
                    escalation = SignalEscalation(action.first, action.grace, action.at)
                    self._stopping[rank] = escalation
            case restart_policy.EscalateSignal():
                for one in self._stopping.values():
                    one.harden(action.signal, now)
            case restart_policy.Send():
                self._hosts.send(action.kind, action.value)
            case restart_policy.PrintMessage():
                extra = BELOW_OUTPUT if action.below_output else None
                logger.log(action.level, action.text, extra=extra)
            case restart_policy.PrintFailure():
                self._show(action.failure)
            case restart_policy.End():
                self._end = action

    def _begin(self, begin: restart_policy.Begin) -> None:
        self._generation, self._began = begin.generation, time.time()
        self._output.begin(begin.generation)
        flight_dir = self._output.of_generation(self._flight_dir, begin.generation)
        self._environment |= {
            InternalVariable.GENERATION: str(begin.generation),
            Variable.FLIGHT_DIR: str(flight_dir),
        }
        if begin.secret:
            self._environment[Variable.SECRET] = begin.secret

    def _start(self, start: restart_policy.Start, now: float) -> None:
        try:
            self._running[start.rank] = self._started(start)
        except LaunchError as error:
            if not start.replacement:
                raise
            if memory := self._progress.pop(start.rank, None):
                memory.take()
            self._output.finish(start.rank)
            self._policy.unavailable(start.rank, str(error))
            self._policy.advance(now)

    def _started(self, start: restart_policy.Start) -> WorkerProcess:
        """Starts a worker. If the worker is a replacement, uses a spare if there is one."""
        rank, line = start.rank, mark(start.rank, start.replacement) if start.replacement else ""
        plan = next(one for one in self._plan(self._policy.addresses) if one.rank == rank)
        self._progress[rank] = memory = ProgressMemory()
        environment = {**self._environment, InternalVariable.PROGRESS_FILE: memory.path}
        with self._output.streams(rank, line) as streams:
            spare = self._spares.take() if start.replacement else None
            if spare is not None:
                try:
                    return spare.become({**environment, **plan.settings}, streams)
                except OSError:
                    # The spare cannot take the task, probably because it has just died.
                    spare.process.end()
                    spare.close()
            return WorkerProcess(plan, environment, streams, self._watchdog)

    def _wait(self, signals: Signals) -> None:
        """Waits until there is an event, or until the next action is due."""
        poll = select.poll()
        poll.register(signals, select.POLLIN)
        self._output.register(poll)
        self._hosts.register(poll)
        times = [
            self._policy.next_time,
            self._policy.next_look,
            *(escalation.next_time for escalation in self._stopping.values()),
            time.monotonic() + _BUSY_SECONDS if self._hosts.is_busy else None,
        ]
        due = min((at for at in times if at is not None), default=None)
        poll.poll(None if due is None else max(0, math.ceil((due - time.monotonic()) * 1000)))

    def _read(self, now: float) -> None:
        """Reads the workers' output and the messages of other hosts."""
        for rank in _readable(self._output.pipes()):
            self._output.copy(rank)
        for host in _readable(self._hosts.descriptors()):
            try:
                for kind, value in self._hosts.receive(host):
                    self._policy.received(host, kind, value, now)
            except (ChannelError, ValueError):
                self._policy.lost(host, lost_host(host, self._hosts.drop(host)), now)
        admitted, addresses = self._hosts.admit(over=self._policy.is_over)
        if admitted:
            self._policy.admitted(admitted, addresses)
        self._hosts.testify()

    def _reap(self, now: float) -> None:
        """Tells the policy which workers have exited.

        A worker that is still running some time after SIGKILL counts as exited, too.
        """
        stuck = {}
        for rank, worker in list(self._running.items()):
            status = worker.exit_code()
            if status is not None:
                self._exited(rank, status, now)
            elif rank in self._stopping and self._stopping[rank].exhausted(now):
                stuck[rank] = f"{rank} (pid {worker.pid})"
        if stuck:
            logger.error(
                f"still running after SIGKILL: worker {', '.join(stuck.values())}; giving up"
            )
        for rank, text in stuck.items():
            self._exited(rank, -signal.SIGKILL, now, text)

    def _exited(self, rank: int, status: int, now: float, stuck: str = "") -> None:
        del self._running[rank]
        self._stopping.pop(rank, None)
        self._output.finish(rank)
        progress = self._progress.pop(rank).take()
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
        self._policy.exited(rank, failure, now, stuck)

    def _look(self, now: float) -> None:
        """Tells the policy which replacements have trained, and which workers are suspended."""
        for rank in self._policy.joining:
            if rank in self._progress and self._progress[rank].read().steps:
                self._policy.trained(rank)
        if self._policy.next_look is not None and now >= self._policy.next_look:
            suspended = [rank for rank, worker in self._running.items() if worker.stopped]
            self._policy.suspended(suspended, now)

    def _send_signals(self, now: float) -> None:
        for rank, escalation in self._stopping.items():
            number = escalation.due(now)
            if number is not None:
                self._running[rank].signal(number)

    def _show(self, failure: Failure | None) -> None:
        """Prints a failure, and the command that explains the flight logs, if there are any."""
        if failure is not None:
            text = describe(failure, self._host, self._output.written())
            logger.error(text, extra=BELOW_OUTPUT)
        flight_dir = self._output.of_generation(self._flight_dir, self._generation)
        logs = flight_dir.glob("flight-*.json")
        if any(log.stat().st_mtime > self._began - _CLOCK_SECONDS for log in logs):
            logger.info(f"What each worker was doing: tfdist doctor --flight {flight_dir}")


def _readable(descriptors: Mapping[int, int]) -> list[int]:
    """Returns the keys of `descriptors`, each of a descriptor that can be read without blocking."""
    poll = select.poll()
    keys = {}
    for key, descriptor in descriptors.items():
        poll.register(descriptor, select.POLLIN)
        keys[descriptor] = key
    return [keys[descriptor] for descriptor, _ in poll.poll(0)]
