"""Rows that a model can learn: a fixed teacher computes their labels."""

from __future__ import annotations

from typing import Any

import numpy as np

from benchmarks.compression.tasks import Task

BATCHES = 32
HELD_OUT = 512
HIDDEN = 16

Array = np.ndarray[Any, Any]


def make_batches(task: Task, workers: int) -> tuple[Array, Array]:
    """Returns the global batches that training cycles through, with labels; deterministic."""
    rows = task.rows * workers
    x, y = make_examples(task, BATCHES * rows, 1)
    return x.reshape(BATCHES, rows, task.features), y.reshape(BATCHES, rows)


def make_held_out(task: Task) -> tuple[Array, Array]:
    """Returns rows and labels that are not trained on."""
    return make_examples(task, HELD_OUT, 2)


def make_examples(task: Task, count: int, seed: int) -> tuple[Array, Array]:
    """Returns rows that are mixtures of a few hidden values, plus noise of the same magnitude.

    The teacher, which is the same for all seeds, computes labels from the hidden values only.

    Args:
        task: the task to train.
        count: the number of rows.
        seed: the seed of the rows.

    Returns:
        Rows, float32, and labels, int32.
    """
    teacher = np.random.default_rng(0)
    spread = teacher.standard_normal((HIDDEN, task.features), np.float32) / HIDDEN**0.5
    judge = teacher.standard_normal((HIDDEN, task.classes), np.float32)
    random = np.random.default_rng(seed)
    hidden = random.standard_normal((count, HIDDEN), np.float32)
    noise = random.standard_normal((count, task.features), np.float32)
    return hidden @ spread + noise, (hidden @ judge).argmax(axis=1).astype(np.int32)
