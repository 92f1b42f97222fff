"""What ranks do in the pipeline's tests, and one process in their stead."""

from __future__ import annotations

import contextlib

import keras
import numpy as np
import tensorflow as tf

import tfdist
from tests.pipeline.zoo import ZOO
from tfdist.internals.keras import has_value
from tfdist.strategies.data import share_of_rows

ROWS, BATCH, EPOCHS = 27, 10, 2


def last_first(ranks, microbatches):
    """A user's own schedule: backward passes begin with the last microbatch."""
    forward = range(microbatches)
    return [
        [("F", rank, m) for m in forward] + [("B", rank, m) for m in reversed(forward)]
        for rank in range(ranks)
    ]


def train(strategy, name, schedule, microbatches, pipeline, by_microbatches, remat=False):
    """Trains, evaluates and predicts with a model of the zoo.

    Args:
        strategy: None for one process.
        name: of the example.
        schedule: the pipeline's.
        microbatches: their number.
        pipeline: the number of its ranks.
        by_microbatches: whether one process trains by the same microbatches.
        remat: whether backward passes run the forward pass again.
    """
    example = ZOO[name]
    schedule = {"own": last_first}.get(schedule, schedule)
    x, y = example.batch(ROWS)
    if strategy is None:
        model = whole = example.build()
        context = contextlib.nullcontext()
    else:
        strategy = tfdist.HybridStrategy(pipeline, microbatches, schedule)
        with strategy.scope():
            model = tfdist.PipelineModel(example.build, by="parameters", remat=remat)
        whole = model.partition.graph.model
        context = strategy.scope()
    with context:
        model.compile(
            keras.optimizers.SGD(0.005, momentum=0.9),
            example.loss,
            metrics={dict: None, str: ["mae"]}.get(type(example.loss), ["accuracy"]),
        )
    if strategy is None and by_microbatches:
        losses = _fit_by_microbatches(model, x, y, microbatches)
    else:
        history = model.fit(x, y, batch_size=BATCH, epochs=EPOCHS, shuffle=False, verbose=0)
        losses = history.history["loss"]
    return {
        "loss": losses,
        "evaluation": model.evaluate(x, y, batch_size=BATCH, verbose=0, return_dict=True),
        "predictions": model.predict(x, batch_size=BATCH, verbose=0),
        "weights": {i: np.array(v) for i, v in enumerate(whole.variables) if has_value(v)},
    }


def _fit_by_microbatches(model, x, y, microbatches):
    @tf.function
    def step(x, y, parts):
        rows = len(keras.tree.flatten(x)[0])
        with tf.GradientTape() as tape:
            total = 0.0
            for m in range(parts):
                start, stop = share_of_rows(rows, m, parts)
                cut = lambda t: t[start:stop]  # noqa: B023, E731
                mine, targets = keras.tree.map_structure(cut, (x, y))
                loss = model.compute_loss(mine, targets, model(mine, training=True), None)
                total += tf.cast(loss, tf.float32) * ((stop - start) / rows)
            scaled = model.optimizer.scale_loss(total)
        variables = model.trainable_variables
        model.optimizer.apply_gradients(
            zip(tape.gradient(scaled, variables), variables, strict=True)
        )
        return total

    losses = []
    for _ in range(EPOCHS):
        sums, seen = 0.0, 0
        for start in range(0, ROWS, BATCH):
            cut = lambda t: tf.constant(t[start : start + BATCH])  # noqa: B023, E731
            mine, targets = keras.tree.map_structure(cut, (x, y))
            rows = min(BATCH, ROWS - start)
            sums += float(step(mine, targets, min(microbatches, rows))) * rows
            seen += rows
        losses.append(sums / seen)
    return losses
