"""Creates random rows with labels that a model can learn.

A fixed function of hidden values, the teacher, computes the labels.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from benchmarks.compression.tasks import Task

BATCHES = 32
HELD_OUT = 512
HIDDEN = 16

Array = np.ndarray[Any, Any]


def make_batches(task: Task, workers: int) -> tuple[Array, Array]:
    """Returns the global batches for training, and their labels. Every call returns the same.

    Training uses the batches one after the other, and then starts again with the first batch.
    """
    rows = task.rows * workers
    x, y = make_examples(task, BATCHES * rows, 1)
    return x.reshape(BATCHES, rows, task.features), y.reshape(BATCHES, rows)


def make_held_out(task: Task) -> tuple[Array, Array]:
    """Returns held-out rows and their labels, which are not used for training."""
    return make_examples(task, HELD_OUT, 2)


def make_examples(task: Task, count: int, seed: int) -> tuple[Array, Array]:
    """Returns random rows and their labels.

    A row is a linear function of a few hidden values, plus noise of the same magnitude. The label
    of a row is a function of its hidden values only. The two functions do not depend on the seed.

    Args:
        task: the task to train.
        count: the number of rows.
        seed: the seed of the hidden values and of the noise.

    Returns:
        The rows as float32, and the labels as int32.
    """
    teacher = np.random.default_rng(0)
    spread = teacher.standard_normal((HIDDEN, task.features), np.float32) / HIDDEN**0.5
    judge = teacher.standard_normal((HIDDEN, task.classes), np.float32)
    random = np.random.default_rng(seed)
    hidden = random.standard_normal((count, HIDDEN), np.float32)
    noise = random.standard_normal((count, task.features), np.float32)
    return hidden @ spread + noise, (hidden @ judge).argmax(axis=1).astype(np.int32)
