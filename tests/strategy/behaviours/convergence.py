"""The training of the benchmark of convergence."""

from __future__ import annotations

from benchmarks.convergence.job import Job
from benchmarks.convergence.tasks import TASKS
from benchmarks.convergence.training import train


def digits(strategy, name):
    """By a codec with its recipe, in a strategy of its own."""
    outcome = train(Job("digits", name, TASKS["digits"].steps, seed=1))
    return {"weights": outcome.weights, "losses": outcome.losses}
