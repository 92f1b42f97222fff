"""The tasks to train. A task consists of a model and the size of its input."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Task:
    """A task: a model learns to classify the rows of `examples`.

    Attributes:
        name: the name of the task, and of its model in `training.BUILDERS`.
        features: the number of values in a row.
        classes: the number of classes.
        rows: the number of rows per worker and step.
        learning_rate: the learning rate of SGD.
    """

    name: str
    features: int
    classes: int
    rows: int
    learning_rate: float


TASKS = {
    task.name: task
    for task in (
        Task("mlp", features=2048, classes=10, rows=32, learning_rate=0.02),
        Task("tiny", features=64, classes=4, rows=8, learning_rate=0.05),
    )
}
