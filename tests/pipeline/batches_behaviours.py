"""Training from datasets that note who reads them."""

from __future__ import annotations

import contextlib

import keras
import numpy as np
import tensorflow as tf

import tfdist
from tfdist._src.internals.variables import has_value

BOUNDS = [(0, 8), (8, 9), (9, 20), (20, 26)]


def _model(strategy, microbatches=3):
    keras.utils.set_random_seed(0)

    def build():
        dense = keras.layers.Dense
        layers = [dense(8, activation="tanh", name=f"layer_{i}") for i in range(3)]
        return keras.Sequential([keras.Input((6,)), *layers, dense(3)])

    if strategy is None:
        model, scope = build(), contextlib.nullcontext
    else:
        strategy = tfdist.PipelineStrategy(microbatches=microbatches)
        scope = strategy.scope
        with scope():
            model = tfdist.PipelineModel(build, cuts=[f"layer_{i}" for i in range(3)])
    with scope():
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
        model.compile(optimizer, loss, weighted_metrics=["accuracy"])
    return model


def _dataset(reads, weighted=False, other_targets=False):
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(26, 6)).astype("float32"), rng.integers(3, size=26)
    weights = np.linspace(0.5, 2, 26, dtype="float32")
    if other_targets:
        y = y.astype("float32")

    def batches():
        for start, stop in BOUNDS:
            reads.append(start)
            batch = (x[start:stop], y[start:stop], weights[start:stop])
            yield batch if weighted else batch[:2]

    kinds = [([None, 6], tf.float32), ([None], y.dtype), ([None], tf.float32)]
    signature = tuple(tf.TensorSpec(*kind) for kind in kinds[: 3 if weighted else 2])
    return tf.data.Dataset.from_generator(batches, output_signature=signature)


def train(strategy):
    """All ways to come to the end of a dataset; how often this rank has read a batch."""
    model, reads, history = _model(strategy), [], []
    # The first call of each kind makes metrics by a batch.
    model.fit(_dataset([], weighted=True), epochs=1, verbose=0)
    model.evaluate(_dataset([]), verbose=0)
    for settings in (
        {"epochs": 2},
        {"epochs": 2, "validation_data": _dataset(reads)},
        {"epochs": 2, "steps_per_epoch": 3, "validation_data": _dataset(reads)},
    ):
        dataset = _dataset(reads)
        if "steps_per_epoch" in settings:
            dataset = dataset.repeat()
        history.append(model.fit(dataset, verbose=0, **settings).history)
    history.append(model.fit(_dataset(reads, weighted=True), verbose=0).history)
    logs = model.evaluate(_dataset(reads), verbose=0, return_dict=True)
    x = np.ones((5, 6), "float32")
    logs["batch"] = model.train_on_batch(x, np.zeros(5, "int64"))
    predictions = model.predict(x, batch_size=3, verbose=0)
    whole = model if strategy is None else model.partition.graph.model
    weights = {i: np.array(v) for i, v in enumerate(whole.variables) if has_value(v)}
    return {"history": history, "logs": logs, "predictions": predictions}, weights, len(reads)


def other_targets(strategy):
    """The last rank has targets of another type."""
    model = _model(strategy)
    reads = []
    model.fit(_dataset(reads, other_targets=strategy.extended.worker_rank == 3), verbose=0)


def other_rows(strategy):
    """A rank that reads nothing may have other rows; the one with the targets may not."""
    rank = strategy.extended.worker_rank
    model = _model(strategy)
    losses = []
    for at in (1, 3):
        dataset = _dataset([])
        losses.append(model.fit(dataset.take(2) if rank == at else dataset, verbose=0).history)
    return losses


def another_order(strategy):
    """Each rank shuffles in an order of its own."""
    model = _model(strategy)
    dataset = _dataset([]).unbatch().shuffle(26, seed=strategy.extended.worker_rank).batch(8)
    model.fit(dataset, verbose=0)


def wrong_shape(strategy):
    """The error of a prediction with a column too many, and the shape of one without."""
    strategy = tfdist.PipelineStrategy(microbatches=2)
    with strategy.scope():
        inputs = keras.Input((6,))
        hidden = keras.layers.Dense(4, name="hidden")(inputs)
        model = tfdist.PipelineModel(
            lambda: keras.Model(inputs, keras.layers.Dense(3)(hidden)), cuts=["hidden"]
        )
    error = ""
    try:
        model.predict(np.ones([8, 7], "float32"), verbose=0)
    except ValueError as problem:
        error = str(problem)
    return error, list(model.predict(np.ones([8, 6], "float32"), verbose=0).shape)


def few_rows(strategy):
    """Moving statistics and loss where one pipeline has a single row and the other many."""
    rank = strategy.extended.worker_rank
    strategy = tfdist.HybridStrategy(pipeline_size=1, microbatches=4)
    with strategy.scope():
        layers = [keras.layers.Dense(4), keras.layers.BatchNormalization(), keras.layers.Dense(2)]
        model = tfdist.PipelineModel(keras.Sequential([keras.Input((6,)), *layers]))
        model.compile("sgd", "mse")
    rows = 1 if rank == 0 else 8

    def own(context):
        rng = np.random.default_rng(rank)
        x = rng.normal(size=[rows, 6]).astype("float32")
        return tf.data.Dataset.from_tensors((x, x[:, :2])).repeat(2)

    history = model.fit(strategy.distribute_datasets_from_function(own), verbose=0).history
    return np.concatenate([np.array(v) for v in layers[1].non_trainable_variables]), history["loss"]
