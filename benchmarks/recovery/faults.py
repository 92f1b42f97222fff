"""Causes a fault in a training, and measures its cost."""

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
    """The settings of all cases.

    Attributes:
        model: a key of `sizes.HIDDEN`.
        victim: one of `cases.VICTIMS`.
        step: the step after which the fault occurs.
        save_every: the number of steps between two saved states.
        silence: seconds without a sign of life after which a worker counts as lost.
        timeout: seconds to wait for the fault's step, and for a new step after the fault.
        torch_python: a Python that has torch.
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
        recoveries: the rounds in which training continued after the fault.
        failures: the reasons why training did not continue in the other rounds.
    """

    recoveries: list[Recovery] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)


def check(case: Case, torch_python: str) -> None:
    """Checks that a backend can run.

    Raises:
        MissingError: the backend cannot run; the message contains the reason.
    """
    if case.backend == "torchrun":
        require(torch_python, "torch", INSTALL_TORCH)


def strike(case: Case, fault: str, workers: int, experiment: Experiment) -> Recovery:
    """Trains, causes a fault, and waits until the training has passed the steps before the fault.

    Raises:
        TeamError: the training does not pass these steps in time.
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
    """Returns the process of a rank after it has ended a step, and all workers train; else None."""
    training = {life.rank: process for process, life in lives.items() if life.last_step}
    if len(training) < workers or lives[training[rank]].last_step < step:
        return None
    return training[rank]


def turns(cases: Sequence[Case], rounds: int) -> list[Case]:
    """Returns the cases of all rounds in order; each round begins with another case."""
    firsts = (turn % max(1, len(cases)) for turn in range(rounds))
    return [case for first in firsts for case in (*cases[first:], *cases[:first])]
