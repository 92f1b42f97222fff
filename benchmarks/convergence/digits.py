"""The task `digits`: a small convolutional network for scikit-learn's images of digits."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
from keras import layers
from sklearn.datasets import load_digits

from benchmarks.convergence.job import Outcome
from benchmarks.convergence.recipes import brings_momentum

BATCH, RATE, MOMENTUM, SMOOTHING = 128, 0.1, 0.9, 0.1
CLASSES = 10


def read_digits() -> tuple[Any, Any]:
    """Returns the training data and the held-out data.

    Each is a pair of images and labels. The images have the shape `(count, 8, 8, 1)` and values
    from 0 to 1. The labels are one-hot vectors with label smoothing.
    """
    pictures, numbers = load_digits(return_X_y=True)
    x = (pictures / 16).reshape(-1, 8, 8, 1).astype("float32")
    y = np.eye(CLASSES, dtype="float32")[numbers] * (1 - SMOOTHING) + SMOOTHING / CLASSES
    held_out = np.arange(len(x)) % 5 == 0
    return (x[~held_out], y[~held_out]), (x[held_out], y[held_out])


def build_model() -> keras.Model:
    """Returns a model with 58 thousand parameters that maps images to logits."""
    return keras.Sequential(
        [
            keras.Input([8, 8, 1]),
            layers.Conv2D(16, 3, padding="same", activation="relu"),
            layers.Conv2D(32, 3, 2, padding="same", activation="relu"),
            layers.Conv2D(64, 3, 2, padding="same", activation="relu"),
            layers.Flatten(),
            layers.Dense(128, "relu"),
            layers.Dense(CLASSES),
        ]
    )


def train(strategy: Any, codec: Any, rate: float, steps: int, seed: int) -> Outcome:
    """Trains with SGD and momentum.

    If the codec applies momentum itself, the optimizer's momentum is 0.

    Args:
        strategy: a strategy that compresses the gradients with the codec.
        codec: the codec with its settings; None for exact training.
        rate: the factor by which the learning rate `RATE` is multiplied.
        steps: the number of steps.
        seed: the seed of the initial weights and of the batches.

    Returns:
        The loss on all training images, the loss on the held-out images, and the weights.
    """
    keras.utils.set_random_seed(seed)
    seen, unseen = read_digits()
    schedule = keras.optimizers.schedules.CosineDecay(
        0.0, steps, warmup_target=RATE * rate, warmup_steps=steps // 10
    )
    with strategy.scope():
        model = build_model()
        optimizer = keras.optimizers.SGD(schedule, 0.0 if brings_momentum(codec) else MOMENTUM)
        loss_function = keras.losses.CategoricalCrossentropy(from_logits=True)
        model.compile(optimizer, loss_function)
    random = np.random.default_rng(seed)
    epochs = -(-steps * BATCH // len(seen[0]))
    order = np.concatenate([random.permutation(len(seen[0])) for _ in range(epochs)])
    order = order[: steps * BATCH]
    model.fit(seen[0][order], seen[1][order], batch_size=BATCH, shuffle=False, verbose=0)
    loss, held_out = (float(loss_function(y, model(x, training=False))) for x, y in (seen, unseen))
    return Outcome({"trained on": loss, "held out": held_out}, model.get_weights())
