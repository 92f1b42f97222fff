"""What each rank runs where the chief cannot write a file."""

from __future__ import annotations

import keras
from keras import layers


def save(strategy, folder):
    """As `save_twice`, of an ordinary model."""
    with strategy.scope():
        model = keras.Sequential([keras.Input([3]), layers.Dense(2)])
    return save_twice(model, folder)


def save_twice(model, folder):
    """The error of saving where there is no folder; what is read of a save afterwards."""
    told = []
    for path in (f"{folder}/missing/model.keras", f"{folder}/model.keras"):
        try:
            model.save(path)
            told.append(keras.models.load_model(path).count_params())
        except OSError as error:
            told.append(str(error))
    return told
