"""Causes a fault in a training run, and measures the time until training continues."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.all_reduce.cleanup import undisturbed
from benchmarks.all_reduce.python import require
from benchmarks.recovery.cases import FAULTS, Case, Order, settings
from benchmarks.recovery.job import Job
from benchmarks.recovery.timeline import Life, Recovery, recovery
from benchmarks.step_time.backends import INSTALL_TORCH


@dataclass(frozen=True)
class Experiment:
    """The settings that all cases have in common.

    Attributes:
        model: a key of `sizes.HIDDEN`.
        victim: the worker that gets the signal, one of `cases.VICTIMS`.
        step: the step after which the fault occurs.
        save_every: the number of steps between two saved states.
        silence: the time in seconds after which an unresponsive worker counts as lost.
        timeout: the maximum time to wait, in seconds: from the start of the job until `step`, and
            again from the fault until the first new step.
        torch_python: the path of a Python interpreter that can import torch.
    """

    model: str
    victim: str
    step: int
    save_every: int
    silence: float
    timeout: float
    torch_python: str


@dataclass
class Results:
    """The results of one case with one fault.

    Attributes:
        recoveries: for each round in which training continued after the fault, its figures.
        failures: for each other round, the reason why training did not continue. If the case cannot
            run here, the only element is the reason for this.
    """

    recoveries: list[Recovery] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)


def check(case: Case, torch_python: str) -> None:
    """Checks that the backend of a case can run here.

    Raises:
        MissingError: the backend cannot run.
    """
    if case.backend == "torchrun":
        require(torch_python, "torch", INSTALL_TORCH)


def strike(case: Case, fault: str, workers: int, experiment: Experiment) -> Recovery:
    """Starts a job, causes a fault, and waits until the job has trained a new step.

    A new step has a higher number than all steps before the fault.

    Raises:
        TeamError: the job ended, or it did not train such a step in time.
    """
    with tempfile.TemporaryDirectory() as folder:
        order = Order(
            case.backend,
            experiment.model,
            workers,
            folder,
            experiment.save_every,
            experiment.silence,
        )
        for part in (order.notes, order.saved):
            Path(part).mkdir()
        command = case.command(order, experiment.torch_python)
        job = Job(command, order.notes, settings(experiment.silence))
        try:
            rank = workers - 1 if experiment.victim == "last" else 0
            victim = job.wait(
                lambda lives: find_victim(lives, workers, rank, experiment.step),
                experiment.timeout,
            )
            signalled = job.signal(victim, FAULTS[fault])
            return job.wait(lambda lives: recovery(lives, victim, signalled), experiment.timeout)
        finally:
            with undisturbed():
                job.stop()


def find_victim(lives: Mapping[int, Life], workers: int, rank: int, step: int) -> int | None:
    """Returns the ID of the process that must get the signal, or None if it is too early.

    The process gets the signal when it has completed a certain step, and when all workers have
    completed at least one step.

    Args:
        lives: the recorded events by process ID.
        workers: the number of workers.
        rank: the rank of the process that must get the signal.
        step: the step after which the fault occurs.
    """
    training = {life.rank: process for process, life in lives.items() if life.last_step}
    if len(training) < workers or lives[training[rank]].last_step < step:
        return None
    return training[rank]


def turns(cases: Sequence[Case], rounds: int) -> list[Case]:
    """Returns all cases for each round, in the order in which they run.

    Each round begins with a different case.
    """
    firsts = (turn % max(1, len(cases)) for turn in range(rounds))
    return [case for first in firsts for case in (*cases[first:], *cases[:first])]
