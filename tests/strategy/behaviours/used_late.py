"""Layers and variables that only a model's `train_step` uses, which the first step trains."""

from __future__ import annotations

import keras
import tensorflow as tf

from tests.strategy.behaviours.common import fit, outcome, rows, scope
from tests.strategy.behaviours.sharded import sharding


class Contrasting(keras.Model):
    """An encoder whose step scales what it encodes, and puts a layer behind it."""

    def __init__(self):
        super().__init__()
        self.encoder = keras.layers.Dense(6, activation="tanh")
        self.head = keras.layers.Dense(4)
        self.scale = tf.Variable(tf.linspace(0.5, 1.5, 6), name="scale")

    def call(self, x):
        return self.encoder(x)

    def train_step(self, data):
        x = data[0]
        with tf.GradientTape() as tape:
            z = self.head(self(x, training=True) * self.scale)
            loss = tf.reduce_mean(z**2) + tf.sqrt(tf.reduce_mean((z - 1.0) ** 2))
        trained = [*self.trainable_variables, self.scale]
        self.optimizer.apply_gradients(zip(tape.gradient(loss, trained), trained, strict=True))
        return {"total": loss}


def _adam(**settings):
    return keras.optimizers.Adam(0.02, epsilon=1e-3, **settings)


def _by_kind():
    sgd, adam = keras.optimizers.SGD(0.1, momentum=0.5), _adam()
    return keras.optimizers.MultiOptimizer(lambda v: sgd if "kernel" in v.name else adam)


def _for_each():
    return keras.optimizers.MultiOptimizer(lambda v: _adam())


def _mapped():
    by_path = keras.optimizers.OptimizerMap(_adam(), {"contrasting/.*": keras.optimizers.SGD(0.1)})
    # A variable of TensorFlow has no path.
    return keras.optimizers.MultiOptimizer(
        lambda v: by_path[getattr(v, "path", "")] if len(v.shape) else by_path.default_optimizer
    )


OPTIMIZERS = {
    "Adam": _adam,
    "scaled": lambda: keras.optimizers.LossScaleOptimizer(_adam()),
    "accumulating": lambda: _adam(gradient_accumulation_steps=2),
    "averaged": lambda: _adam(use_ema=True, ema_overwrite_frequency=2),
    "accumulating and averaged": lambda: _adam(
        gradient_accumulation_steps=2, use_ema=True, ema_overwrite_frequency=3
    ),
    "several": _by_kind,
    "several, mapped": _mapped,
    "one for each": _for_each,
    "several, scaled": lambda: keras.optimizers.LossScaleOptimizer(_by_kind()),
}
WAYS = {
    "step by step": {},
    "several steps": {"steps_per_execution": 2},
    "eagerly": {"run_eagerly": True},
    "compiled": {"jit_compile": True},
}


def trained(strategy, optimizer, way, sharded):
    if not hasattr(keras.optimizers, "MultiOptimizer") and optimizer in (
        "several",
        "several, mapped",
        "one for each",
        "several, scaled",
    ):
        return {"no such optimizer": True}
    x, _ = rows(14)
    with scope(sharding(strategy) if sharded else strategy):
        model = Contrasting()
        model.compile(OPTIMIZERS[optimizer](), **WAYS[way])
    history = fit(model, x, x, batch_size=5, shuffle=False)
    state = [v.numpy() for v in model.optimizer.variables] if not sharded else []
    counts = [float(v) for v in state if v.ndim == 0]
    return outcome(model, history, scale=model.scale.numpy(), counts=counts, slots=len(state))
