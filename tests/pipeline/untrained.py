"""What each rank runs where a stage trains nothing."""

from __future__ import annotations

import contextlib

import keras
import numpy as np
from keras import layers

import tfdist

OPTIMIZERS = {
    "clipped": lambda: keras.optimizers.SGD(0.1, global_clipnorm=0.01),
    # Whose scale doubles at every step.
    "scaled": lambda: keras.optimizers.LossScaleOptimizer(
        keras.optimizers.SGD(0.1), dynamic_growth_steps=1
    ),
}


def train(strategy, optimizer):
    """Trains with a last stage without weights; the losses and weights."""
    keras.utils.set_random_seed(0)
    scope = contextlib.nullcontext()
    if strategy is not None:
        strategy = tfdist.HybridStrategy(pipeline_size=2, microbatches=2)
        scope = strategy.scope()
    with scope:
        model = _build() if strategy is None else tfdist.PipelineModel(_build, cuts=["head"])
        model.compile(OPTIMIZERS[optimizer](), "mse")
    x = np.random.default_rng(0).normal(size=[8, 4]).astype("float32")
    losses = [float(model.train_on_batch(x, x[:, :2])) for _ in range(3)]
    return losses, [np.array(v) for v in model.trainable_variables]


def _build():
    return keras.Sequential(
        [keras.Input([4]), layers.Dense(3), layers.Dense(2, name="head"), layers.Activation("tanh")]
    )
