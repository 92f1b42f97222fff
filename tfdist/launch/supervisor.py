"""The launcher's event loop: starts this machine's workers and brings all of them to an end."""

from __future__ import annotations

import math
import select
import signal
import time
from collections.abc import Mapping, Sequence

from tfdist.launch.console import say
from tfdist.launch.hosts.host_group import HostGroup
from tfdist.launch.job.failure import Failure, FirstFailure, stopped_by, worker_failure
from tfdist.launch.job.log_routing import Output
from tfdist.launch.job.plan import WorkerPlan
from tfdist.launch.job.shutdown import SignalEscalation
from tfdist.launch.job.signals import Signals
from tfdist.launch.job.watchdog import Watchdog
from tfdist.launch.job.worker import WorkerProcess

# A failure that may be the consequence of another one waits so long for it.
_PATIENCE = 1.0
# A node other than node 0 waits so long for node 0's judgement.
_PATIENCE_FOR_NODE_0 = 3.0


class Supervisor:
    """Runs the workers of one machine.

    Args:
        plans: what to start.
        environment: what the workers inherit.
        output: where their output goes.
        team: the other nodes.
        node: this node's number.
        watchdog: who kills the workers when this process dies.
        grace: seconds between two ever harder signals.
    """

    def __init__(
        self,
        *,
        plans: Sequence[WorkerPlan],
        environment: Mapping[str, str],
        output: Output,
        team: HostGroup,
        node: int,
        watchdog: Watchdog,
        grace: float,
    ) -> None:
        self._plans = plans
        self._environment = environment
        self._output = output
        self._team = team
        self._node = node
        self._watchdog = watchdog
        self._grace = grace
        self._running: dict[int, WorkerProcess] = {}
        patience = _PATIENCE if team.judges else _PATIENCE_FOR_NODE_0
        self._first = FirstFailure(patience, judges=team.judges)
        self._ladder: SignalEscalation | None = None
        self._reported_done = False

    def run(self) -> Failure | None:
        """Starts the workers and returns when all have ended.

        Returns:
            What ended the job; None if all workers of all nodes ended well.

        Raises:
            LaunchError: a worker cannot be started.
        """
        with Signals() as signals:
            try:
                for plan in self._plans:
                    self._start(plan)
                while not self._over():
                    self._wait(signals)
                    now = time.monotonic()
                    for number in signals.take():
                        self._obey(number, now)
                    self._listen(now)
                    self._collect(now)
                    self._judge(now)
                    self._push(now)
            finally:
                for worker in self._running.values():
                    worker.signal(signal.SIGKILL)
        return self._team.verdict

    def _start(self, plan: WorkerPlan) -> None:
        with self._output.streams(plan.rank) as streams:
            self._running[plan.rank] = WorkerProcess(
                plan, self._environment, streams, self._watchdog
            )

    def _over(self) -> bool:
        if not self._running:
            return self._ladder is not None or self._team.finished
        if self._ladder is not None and self._ladder.exhausted(time.monotonic()):
            stuck = ", ".join(f"{rank} (pid {w.pid})" for rank, w in self._running.items())
            say(f"not even SIGKILL ends worker {stuck}; left as it is")
            return True
        return False

    def _wait(self, signals: Signals) -> None:
        """Sleeps until something happens or is due."""
        poll = select.poll()
        poll.register(signals, select.POLLIN)
        for pipe in self._output.pipes().values():
            poll.register(pipe, select.POLLIN)
        for link in self._team.links().values():
            poll.register(link, select.POLLIN)
        due = self._first.deadline if self._ladder is None else self._ladder.next_time
        poll.poll(None if due is None else max(0, math.ceil((due - time.monotonic()) * 1000)))

    def _obey(self, number: signal.Signals, now: float) -> None:
        """Stops the workers because this process got a signal."""
        gentle = number == signal.SIGINT
        if self._ladder is not None:
            self._ladder.harden(signal.SIGKILL if gentle else signal.SIGTERM, now)
            return
        failure = self._first.best() or stopped_by(self._node, number)
        self._team.report(failure)
        self._team.announce(failure)
        self._ladder = SignalEscalation(
            signal.SIGINT if gentle else signal.SIGTERM, self._grace, now
        )

    def _listen(self, now: float) -> None:
        for rank in _readable(self._output.pipes()):
            self._output.copy(rank)
        for node in _readable({node: c.fileno() for node, c in self._team.links().items()}):
            failure = self._team.receive(node)
            if failure is not None:
                self._first.add(failure, now)

    def _collect(self, now: float) -> None:
        """Takes note of the workers that have ended."""
        for rank, worker in list(self._running.items()):
            status = worker.ended()
            if status is None:
                continue
            del self._running[rank]
            self._output.finish(rank)
            if status != 0 and self._ladder is None:
                failure = worker_failure(
                    node=self._node,
                    rank=rank,
                    status=status,
                    tail=self._output.tail(rank),
                    log="" if self._output.inherited(rank) else str(self._output.log(rank)),
                )
                self._first.add(failure, now)
                self._team.report(failure)
        if not self._running and self._first.best() is None and not self._reported_done:
            self._reported_done = True
            self._team.done()

    def _judge(self, now: float) -> None:
        """Begins to stop the workers when it is known what failed first."""
        if self._ladder is not None:
            return
        if self._team.verdict is None:
            failure = self._first.verdict(now)
            if failure is None and not self._running and not self._team.links():
                failure = self._first.best()  # Nothing can come that would be clearer.
            if failure is None:
                return
            self._team.announce(failure)
        if self._running:
            say(f"{self._team.verdict} Stopping the other workers.", below_output=True)
        self._ladder = SignalEscalation(signal.SIGTERM, self._grace, now)

    def _push(self, now: float) -> None:
        number = self._ladder.due(now) if self._ladder is not None else None
        if number is not None:
            for worker in self._running.values():
                worker.signal(number)


def _readable(descriptors: Mapping[int, int]) -> list[int]:
    """The keys whose descriptors can be read without waiting."""
    poll = select.poll()
    keys = {}
    for key, descriptor in descriptors.items():
        poll.register(descriptor, select.POLLIN)
        keys[descriptor] = key
    return [keys[descriptor] for descriptor, _ in poll.poll(0)]
