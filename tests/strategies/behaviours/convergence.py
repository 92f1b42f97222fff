"""The training of the benchmark of convergence."""

from __future__ import annotations

from pathlib import Path

import pytest

with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(str(Path(__file__).parents[3] / "benchmarks"))
    from converging.job import Job
    from converging.tasks import TASKS
    from converging.training import train


def digits(strategy, name):
    """By a codec with its recipe, in a strategy of its own."""
    outcome = train(Job("digits", name, TASKS["digits"].steps, seed=1))
    return {"weights": outcome.weights, "losses": outcome.losses}
