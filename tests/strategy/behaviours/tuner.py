"""A search for hyperparameters by KerasTuner."""

from __future__ import annotations

import tempfile

import keras
import keras_tuner

from tests.strategy.behaviours.common import cross_entropy, rows, scope

_TUNERS = {
    "grid": lambda *given, **more: keras_tuner.GridSearch(*given, max_trials=2, **more),
    "random": lambda *given, **more: keras_tuner.RandomSearch(*given, max_trials=3, seed=3, **more),
    "hyperband": lambda *given, **more: keras_tuner.Hyperband(*given, max_epochs=3, seed=2, **more),
}


def _build(hyperparameters):
    units = hyperparameters.Choice("units", [2, 4, 6])
    layers = [keras.Input((8,)), keras.layers.Dense(units, activation="tanh")]
    model = keras.Sequential([*layers, keras.layers.Dense(3)])
    rate = hyperparameters.Choice("rate", [0.1, 0.5])
    model.compile(keras.optimizers.SGD(rate), cross_entropy(), metrics=["accuracy"])
    return model


def searched(strategy, kind, given):
    """The best hyperparameters and weights.

    Args:
        strategy: or None for one process.
        kind: a key of `_TUNERS`.
        given: whether the tuner is given the strategy, or models are built in its scope.
    """
    folder = tempfile.mkdtemp()
    if strategy:
        folder = strategy.extended.group.exchange("folder", folder)[0]

    def build(hyperparameters):
        with scope(strategy):
            return _build(hyperparameters)

    settings = {"objective": "val_loss", "directory": folder, "project_name": "search"}
    if given:
        settings["distribution_strategy"] = strategy
    tuner = _TUNERS[kind](_build if given else build, **settings)
    keras.utils.set_random_seed(1)
    x, y = rows(32)
    tuner.search(x, y, epochs=2, validation_data=(x, y), verbose=0)
    (best,), (model,) = tuner.get_best_hyperparameters(1), tuner.get_best_models(1)
    return {"best": best.values, "weights": model.get_weights()}
