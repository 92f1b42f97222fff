"""All losses that Keras has, each with a layer of its own, in one model."""

from __future__ import annotations

import inspect

import keras
import numpy as np

from tests.strategy.behaviours.common import fit, outcome, scope

CLASSES = 3


def _losses():
    found = {
        name: loss
        for name, loss in vars(keras.losses).items()
        if inspect.isclass(loss) and issubclass(loss, keras.losses.Loss)
    }
    del found["Loss"]
    assert len(found) >= 20
    return found


def _head(name, x):
    if name == "CTC":
        return keras.layers.Reshape((4, 5), name=name)(keras.layers.Dense(20)(x))
    if name == "Circle":
        return keras.layers.UnitNormalization(name=name)(keras.layers.Dense(CLASSES)(x))
    return keras.layers.Dense(CLASSES, activation="softmax", name=name)(x)


def _targets(name, rows):
    generator = np.random.default_rng(len(name))
    if name == "CTC":
        return generator.integers(1, 5, (rows, 2))
    if name in ("SparseCategoricalCrossentropy", "CategoricalGeneralizedCrossEntropy", "Circle"):
        return generator.integers(0, CLASSES, rows)
    return generator.random((rows, CLASSES)).astype("float32")


def every_loss(strategy, reduction, weighted):
    losses = _losses()
    if reduction == "none":
        for one_number_for_a_batch in ("Circle", "Dice", "Tversky"):
            del losses[one_number_for_a_batch]
    x = np.random.default_rng(0).normal(size=(11, 4)).astype("float32")
    weights = np.linspace(0.1, 2, 11, dtype="float32") if weighted else None
    with scope(strategy):
        inputs = keras.Input((4,))
        model = keras.Model(inputs, {name: _head(name, inputs) for name in losses})
        model.compile(
            keras.optimizers.SGD(0.005),
            {name: loss(reduction=reduction) for name, loss in losses.items()},
            run_eagerly=True,  # Sooner than a graph of all of them.
        )
    targets = {name: _targets(name, 11) for name in losses}
    # Batches of seven and of four rows, of which two workers take four and three, two and two.
    settings = {"sample_weight": weights, "batch_size": 7, "shuffle": False}
    return outcome(model, fit(model, x, targets, epochs=1, **settings))


def ratios_along_axes_and_in_functions(strategy):
    """Dice and Tversky for each row, for each channel, and within losses by hand."""

    def by_hand(y_true, y_pred):
        mean = keras.losses.binary_crossentropy(y_true, y_pred)
        return mean + keras.losses.dice(y_true, y_pred)

    losses = {
        "for_each_row": keras.losses.Dice(axis=(1, 2)),
        "for_each_channel": keras.losses.Tversky(axis=(0, 1), alpha=0.3, beta=0.6),
        "similar_columns": keras.losses.CosineSimilarity(axis=0),
        "by_name": "dice",
        "by_function": keras.losses.tversky,
        "by_hand": by_hand,
    }
    generator = np.random.default_rng(0)
    x = generator.normal(size=(11, 4)).astype("float32")
    y = generator.random((11, 3, 2)).round().astype("float32")
    with scope(strategy):
        inputs = keras.Input((4,))
        outputs = {}
        for name in losses:
            hidden = keras.layers.Dense(6, activation="sigmoid")(inputs)
            outputs[name] = keras.layers.Reshape((3, 2), name=name)(hidden)
        model = keras.Model(inputs, outputs)
        model.compile(keras.optimizers.SGD(0.5), losses)
    history = fit(model, x, dict.fromkeys(losses, y), batch_size=7, shuffle=False)
    return outcome(model, history)


def masked_ratio(strategy):
    x = np.random.default_rng(0).integers(0, 3, (11, 5))
    y = np.random.default_rng(1).random((11, 5, 2)).astype("float32")
    with scope(strategy):
        model = keras.Sequential(
            [
                keras.Input((5,)),
                keras.layers.Embedding(3, 4, mask_zero=True),
                keras.layers.Dense(2, activation="sigmoid"),
            ]
        )
        model.compile(keras.optimizers.SGD(0.5), keras.losses.Dice(axis=(0, 2)))
    return outcome(model, fit(model, x, y, batch_size=7, shuffle=False))


def rows_that_two_workers_cannot_share(strategy):
    """A batch of one row, which leaves a worker without any."""
    x = np.random.default_rng(0).normal(size=(5, 4)).astype("float32")
    y = np.random.default_rng(1).random((5, 3)).round().astype("float32")
    with scope(strategy):
        inputs = keras.Input((4,))
        model = keras.Model(inputs, [_head("Dice", inputs), _head("Circle", inputs)])
        model.compile(keras.optimizers.SGD(0.5), [keras.losses.Dice(), keras.losses.Circle()])
    return outcome(model, fit(model, x, [y, y.argmax(1)], batch_size=4, shuffle=False))


def unreduced_circle(strategy):
    """A loss that is one number for the batch, whatever its reduction."""
    x = np.random.default_rng(0).random((7, 4)).astype("float32")
    y = np.arange(7) % 2
    with scope(strategy):
        inputs = keras.Input((4,))
        model = keras.Model(inputs, _head("Circle", inputs))
        model.compile("sgd", keras.losses.Circle(reduction=None))
    return outcome(model, fit(model, x, y, batch_size=4))
