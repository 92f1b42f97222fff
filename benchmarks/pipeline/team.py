"""Starts the workers of one backend, which then take steps on request."""

from __future__ import annotations

import sys
import time

from benchmarks.all_reduce.python import require
from benchmarks.pipeline.backends import BACKENDS, Entry
from benchmarks.step_time.backends import INSTALL_TORCH
from benchmarks.step_time.members import Members
from benchmarks.step_time.team import free_addresses

Times = list[list[tuple[float, float]]]


class Team(Members):
    """The workers of one backend, which sleep between requests.

    Args:
        backend: a key of `BACKENDS`.
        workers: the number of workers of a pipeline. Other backends have one worker.
        model: a key of `WORKLOADS`.
        pass_seconds: see `keras_trainer.Trainer`.
        torch_python: the Python interpreter for backends that use torch.
        timeout: the maximum time to wait for an answer, in seconds.

    Raises:
        MissingError: the backend cannot run here.
        TeamError: a worker failed to start.
    """

    def __init__(
        self,
        backend: str,
        workers: int,
        model: str,
        pass_seconds: float | None,
        torch_python: str = sys.executable,
        timeout: float = 300.0,
    ) -> None:
        python = sys.executable
        if BACKENDS[backend].framework == "torch":
            require(torch_python, "torch", INSTALL_TORCH)
            python = torch_python
        workers = workers if BACKENDS[backend].in_stages else 1
        addresses = free_addresses(workers) if BACKENDS[backend].in_stages else []
        order = {
            "backend": backend,
            "model": model,
            "addresses": addresses,
            "pass_seconds": pass_seconds,
        }
        super().__init__(
            [[python, "-m", "benchmarks.pipeline.worker"]] * workers,
            [{**order, "rank": rank} for rank in range(workers)],
            timeout,
        )
        try:
            self.ask(("begin", ()))
        except BaseException:
            self.stop()
            raise

    def steps(self, entry: Entry, count: int) -> float:
        """Takes steps on all workers concurrently.

        Returns:
            The total time of the steps on the slowest worker, in seconds.

        Raises:
            TeamError: a worker failed or did not answer.
        """
        return max(self.ask(("steps", (entry.schedule, entry.microbatches, count))))

    def first_step(self, entry: Entry) -> float:
        """Builds the model of an entry, takes a step, and returns the total time in seconds.

        Raises:
            TeamError: a worker failed or did not answer.
        """
        start = time.perf_counter()
        self.steps(entry, 1)
        return time.perf_counter() - start

    def timeline(self, entry: Entry) -> Times:
        """Takes a step, and returns the start and the end of each action in seconds.

        The result contains a list for each rank. Each list is in the order in which the rank
        executes its actions.

        Raises:
            TeamError: a worker failed or did not answer.
        """
        times: Times = self.ask(("timeline", (entry.schedule, entry.microbatches)))[0]
        return times
