"""The tasks to train."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Task:
    """A task.

    Attributes:
        module: the name of the module that defines the task's `train` function.
        steps: the default number of steps.
        smallest: the argument `smallest` of `tfdist.compression.Policy`: gradients with fewer
            values are not compressed.
    """

    module: str
    steps: int
    smallest: int


TASKS = {
    "char_lm": Task("benchmarks.convergence.char_lm", steps=200, smallest=4096),
    "digits": Task("benchmarks.convergence.digits", steps=300, smallest=0),
}
