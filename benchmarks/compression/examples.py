"""Rows that can be learnt: a fixed teacher gives them their labels."""

from __future__ import annotations

from typing import Any

import numpy as np

from benchmarks.compression.tasks import Task

BATCHES = 32
HELD_OUT = 512
HIDDEN = 16

Array = np.ndarray[Any, Any]


def make_batches(task: Task, workers: int) -> tuple[Array, Array]:
    """The global batches that are trained on in turn, and their labels; the same every time."""
    rows = task.rows * workers
    x, y = make_examples(task, BATCHES * rows, 1)
    return x.reshape(BATCHES, rows, task.features), y.reshape(BATCHES, rows)


def make_held_out(task: Task) -> tuple[Array, Array]:
    """Rows and labels that are not trained on."""
    return make_examples(task, HELD_OUT, 2)


def make_examples(task: Task, count: int, seed: int) -> tuple[Array, Array]:
    """Rows of a few hidden values, spread over all features, under as much noise.

    The teacher, which is the same for all seeds, sees the hidden values alone.

    Args:
        task: what is trained.
        count: of rows.
        seed: other rows for another one.

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
