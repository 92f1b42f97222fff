"""What there is to train."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Task:
    """A training whose final loss is compared.

    Attributes:
        module: that has `train`.
        steps: unless told otherwise.
        smallest: gradients of fewer values stay exact, as by `Policy`.
    """

    module: str
    steps: int
    smallest: int


TASKS = {
    "char_lm": Task("benchmarks.convergence.char_lm", steps=200, smallest=4096),
    "digits": Task("benchmarks.convergence.digits", steps=300, smallest=0),
}
