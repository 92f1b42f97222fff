"""What Keras offers, on a pipeline and in one process."""

from __future__ import annotations

import contextlib

import keras
import numpy as np
import tensorflow as tf
from keras import layers

import tfdist
from tfdist._src.internals.variables import has_value
from tfdist.callbacks import LearningRateWarmup

ROWS, BATCH = 26, 8


def _build():
    inputs = keras.Input((6,))
    x = skip = layers.Dense(8, activation="relu")(inputs)
    x = layers.Dense(8, activation="tanh", kernel_regularizer="l2")(x)
    x = layers.Add()([layers.Dense(8)(x), skip])
    return keras.Model(inputs, layers.Dense(3)(layers.LayerNormalization()(x)))


def _data():
    rng = np.random.default_rng(0)
    return rng.normal(size=(ROWS, 6)).astype("float32"), rng.integers(3, size=ROWS)


@contextlib.contextmanager
def _model(strategy, optimizer=None, made=False, **arguments):
    """A compiled model, on a pipeline of the given strategy's workers or by itself."""
    keras.utils.set_random_seed(0)
    if strategy is None:
        scope, model = contextlib.nullcontext, _build()
    else:
        strategy = tfdist.HybridStrategy(pipeline_size=2, microbatches=3, schedule="1f1b")
        scope = strategy.scope
        with scope():
            model = tfdist.PipelineModel(_build() if made else _build, balance="parameters")
    arguments.setdefault("metrics", ["accuracy"])
    with scope():
        model.compile(
            (optimizer or (lambda: keras.optimizers.SGD(0.05, momentum=0.9)))(),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            **arguments,
        )
    yield model


def _result(model, history=None, **more):
    whole = model if not isinstance(model, tfdist.PipelineModel) else model.partition.graph.model
    weights = {i: np.array(v) for i, v in enumerate(whole.variables) if has_value(v)}
    return {"history": history and history.history, "own": weights, **more}


def _fit(strategy, optimizer=None, made=False, fit=None, huge=False, **arguments):
    x, y = _data()
    if huge:
        x[BATCH] = 1e38
    with _model(strategy, optimizer, made, **arguments) as model:
        given = {"batch_size": BATCH, "epochs": 2, "shuffle": False, "verbose": 0, **(fit or {})}
        return _result(model, model.fit(x, y, **given))


def made_already(strategy):
    """A model rather than a function that makes it."""
    return _fit(strategy, made=True)


def sample_weights(strategy):
    """With weighted metrics."""
    weights = np.linspace(0.2, 2, ROWS, dtype="float32")
    return _fit(strategy, fit={"sample_weight": weights}, weighted_metrics=["accuracy"])


def class_weights_and_validation(strategy):
    """By a fraction of the data."""
    return _fit(strategy, fit={"class_weight": {0: 1.0, 1: 2.0, 2: 0.5}, "validation_split": 0.3})


def several_steps_at_once(strategy):
    """`steps_per_execution`."""
    return _fit(strategy, steps_per_execution=3)


def clipping_and_averaging(strategy):
    """The global norm over all stages; moving averages of the weights."""
    return _fit(
        strategy,
        lambda: keras.optimizers.Adam(
            0.01, global_clipnorm=0.3, use_ema=True, ema_momentum=0.9, epsilon=1e-3
        ),
    )


def accumulating_gradients(strategy):
    """With a learning rate that falls."""
    return _fit(
        strategy,
        lambda: keras.optimizers.SGD(
            keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5), gradient_accumulation_steps=2
        ),
    )


def overflow(strategy):
    """A step whose gradients are not finite is skipped by all, and the scale falls."""
    scaled = keras.optimizers.LossScaleOptimizer
    return _fit(
        strategy, lambda: scaled(keras.optimizers.SGD(0.05), dynamic_growth_steps=3), huge=True
    )


def a_generator(strategy):
    """A dataset of unknown length, of uneven batches."""
    x, y = _data()
    bounds = [(0, 8), (8, 9), (9, 20), (20, 26)]

    def batches():
        for start, stop in bounds:
            yield x[start:stop], y[start:stop]

    signature = (tf.TensorSpec([None, 6], tf.float32), tf.TensorSpec([None], tf.int64))
    dataset = tf.data.Dataset.from_generator(batches, output_signature=signature)
    with _model(strategy) as model:
        return _result(model, model.fit(dataset, epochs=2, verbose=0))


def single_batches(strategy):
    """`train_on_batch` and its kin."""
    x, y = _data()
    with _model(strategy) as model:
        logs = [model.train_on_batch(x[:8], y[:8]) for _ in range(3)]
        logs += [model.test_on_batch(x, y), model.predict_on_batch(x[:5])]
        return _result(model, logs=logs)


def learning_rates_by_callbacks(strategy):
    """A plateau, and an early end."""
    callbacks = [
        keras.callbacks.ReduceLROnPlateau("loss", factor=0.5, patience=0, min_delta=10.0),
        keras.callbacks.EarlyStopping("loss", patience=2, min_delta=10.0),
    ]
    return _fit(strategy, fit={"callbacks": callbacks, "epochs": 6})


def warmed_up(strategy):
    """The learning rate, with loss scaling and several calls of `fit`."""
    x, y = _data()
    scaling = keras.optimizers.LossScaleOptimizer
    with _model(strategy, lambda: scaling(keras.optimizers.Adam(0.05))) as model:
        given = {"batch_size": BATCH, "epochs": 1, "shuffle": False, "verbose": 0}
        warmup = LearningRateWarmup(epochs=1.5)
        histories = [
            model.fit(x, y, callbacks=callbacks, **given).history
            for callbacks in ([warmup], [warmup], [])
        ]
        return _result(model, logs=histories)
