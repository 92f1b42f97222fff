"""Ends workers that have been stopped by a signal for so long that the others have given them up.

Nobody else would: such a process never ends by itself, and the job would not end without it. Where
all are stopped, as when a scheduler suspends a job, nobody has given anybody up.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping

from tfdist.launch.console import say
from tfdist.launch.elastic.worker_states import WorkerStates
from tfdist.launch.hosts.worker_counts import WorkerCounts
from tfdist.launch.job.worker import WorkerProcess

_LOOK_SECONDS = 1.0
_MARGIN_SECONDS = 5.0


class PausedWorkers:
    """Looks at the workers of a host now and then.

    Args:
        silence: seconds after which the others give up a worker that does not answer.

    Attributes:
        next_time: when to look again.
    """

    def __init__(self, silence: float) -> None:
        self._patience = silence + _MARGIN_SECONDS
        self._since: dict[int, float] = {}  # by the process's id
        self.next_time = 0.0

    def end(
        self,
        running: Mapping[int, WorkerProcess],
        states: WorkerStates,
        job: WorkerCounts,
        now: float,
    ) -> None:
        """Kills those that the others have given up.

        Args:
            running: this host's workers by rank.
            states: what they do.
            job: what has become of the workers of all hosts.
            now: the current time, in seconds of any clock.
        """
        if now < self.next_time:
            return
        self.next_time = now + _LOOK_SECONDS
        stopped = {rank: worker for rank, worker in running.items() if worker.stopped}
        if len(stopped) == len(running) and not job.completed:
            stopped = {}
        self._since = {worker.pid: self._since.get(worker.pid, now) for worker in stopped.values()}
        for rank, worker in stopped.items():
            seconds = now - self._since[worker.pid]
            if seconds >= self._patience:
                if job.completed:
                    states.unneeded(rank)
                say(
                    f"worker {rank} has been stopped (SIGSTOP) for {seconds:.0f} s, so the others "
                    "have given it up. Killing it.",
                    below_output=True,
                )
                worker.signal(signal.SIGKILL)
