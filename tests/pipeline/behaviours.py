"""What ranks do in the pipeline's tests, and one process in their stead."""

from __future__ import annotations

import contextlib

import keras
import numpy as np
import tensorflow as tf

import tfdist
from tests.pipeline.zoo import ZOO
from tfdist._src.data.shares import share_of_rows
from tfdist._src.internals.variables import has_value

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
        strategy = tfdist.HybridStrategy(
            pipeline_size=pipeline, microbatches=microbatches, schedule=schedule
        )
        with strategy.scope():
            model = tfdist.PipelineModel(example.build, balance="parameters", remat=remat)
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
    variables = model.trainable_variables

    def differentiate(x, y, share):
        with tf.GradientTape() as tape:
            loss = model.compute_loss(x, y, model(x, training=True), None)
            loss = tf.cast(loss, tf.float32) * share
            scaled = model.optimizer.scale_loss(loss)
        gradients = tape.gradient(scaled, variables)
        return loss, [g if g is None else tf.convert_to_tensor(g) for g in gradients]

    forms = keras.tree.map_structure(lambda t: tf.TensorSpec([None, *t.shape[1:]], t.dtype), (x, y))
    differentiate = tf.function(differentiate, input_signature=[*forms, tf.TensorSpec([])])

    @tf.function
    def update(gradients):
        model.optimizer.apply_gradients(zip(gradients, variables, strict=True))

    losses = []
    for _ in range(EPOCHS):
        total = 0.0
        for first in range(0, ROWS, BATCH):
            rows = min(BATCH, ROWS - first)
            parts, sums = min(microbatches, rows), None
            for m in range(parts):
                start, stop = share_of_rows(rows, m, parts)
                cut = lambda t: t[first + start : first + stop]  # noqa: B023, E731
                own = keras.tree.map_structure(cut, (x, y))
                loss, gradients = differentiate(*own, (stop - start) / rows)
                sums = (
                    gradients
                    if m == 0
                    else [a if a is None else a + b for a, b in zip(sums, gradients, strict=True)]
                )
                total += float(loss) * rows
            update(sums)
        losses.append(total / ROWS)
    return losses
