"""The tasks to train."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Task:
    """A training with a final loss to compare.

    Attributes:
        module: the module that defines `train`.
        steps: the default number of steps.
        smallest: gradients with fewer values stay exact; see `Policy`.
    """

    module: str
    steps: int
    smallest: int


TASKS = {
    "char_lm": Task("benchmarks.convergence.char_lm", steps=200, smallest=4096),
    "digits": Task("benchmarks.convergence.digits", steps=300, smallest=0),
}
