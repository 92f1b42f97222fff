"""Runs the training steps of a program on simulated workers of one process, and compares them.

This takes a fraction of the time of real workers. It tests only the partitioner, not the
distribution of data, the collectives of gradients, or evaluation.
"""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tests.enumeration.losses import WAYS, Use
from tests.enumeration.programs import find
from tests.enumeration.training import BATCH, ROWS, Training
from tests.global_view.simulation import Workers, compare, split
from tests.strategy.behaviours.common import scope


def simulated_difference(name: str, workers: int = 2) -> str | None:
    """Describes how the training steps of a program differ from one process.

    Returns:
        The difference; "" if there is none, and None if the program cannot be simulated.
    """
    training = _training(name)
    if training is None:
        return None
    try:
        return _difference(training, workers)
    except AssertionError as error:
        return str(error).strip() or "values differ"
    finally:
        keras.backend.clear_session()


def _training(name: str) -> Training | None:
    program = find(name)
    if isinstance(program, Use):
        program = WAYS[program.way](program)
    return program if isinstance(program, Training) else None


def _difference(training: Training, count: int) -> str | None:
    with scope(None):
        model = training.model()
        if training.compile:
            model.compile(**training.compile())
    data = training.data()
    leaves = tf.nest.flatten(data)
    if model.run_eagerly or any(isinstance(x, (tf.RaggedTensor, tf.SparseTensor)) for x in leaves):
        return None
    leaves = [np.asarray(leaf) for leaf in leaves]
    first = [leaf[:BATCH] for leaf in leaves]
    _build(model, tf.nest.pack_sequence_as(data, first))

    def step(*flat: Any) -> list[Any]:
        logs = model.train_step(tf.nest.pack_sequence_as(data, list(flat)))
        return [tf.convert_to_tensor(value) for value in tf.nest.flatten(logs)]

    held = [variable.value for metric in model.metrics for variable in metric.variables]
    workers = Workers(step, first, count, partial=held)
    for start, end in ((0, BATCH), (BATCH, ROWS)):
        batch = [leaf[start:end] for leaf in leaves]
        if not len(batch[0]):
            break
        _compare(workers, batch, split(len(batch[0]), count))
    return ""


def _build(model: keras.Model, batch: Any) -> None:
    """Creates all variables, as `fit` does before its first step."""
    model._symbolic_build(data_batch=tf.nest.map_structure(tf.constant, batch))
    if model.optimizer is not None and not model.optimizer.built:
        model.optimizer.build(model.trainable_variables)


def _compare(workers: Workers, batch: list[Any], shares: list[int]) -> None:
    whole = workers.concrete(*map(tf.constant, batch))
    expected = [result.numpy() for result in tf.nest.flatten(whole)]
    for rank, results in enumerate(workers.step(batch, shares)):
        for i, (result, wanted) in enumerate(zip(results, expected, strict=True)):
            compare(result, wanted, 1e-5, f"rank {rank}, log {i}")
    workers.check_variables()
