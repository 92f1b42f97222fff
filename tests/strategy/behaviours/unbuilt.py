"""Models that a step builds, among others in the same process."""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf

from tests.strategy.behaviours.common import compile_mlp, cross_entropy, fit, outcome, rows, scope


class Net(keras.Model):
    """Builds its layers in its first call."""

    def __init__(self):
        super().__init__()
        self.hidden = keras.layers.Dense(6, activation="tanh")
        self.out = keras.layers.Dense(3)

    def call(self, x):
        return self.out(self.hidden(x))


class OfRagged(Net):
    """A call that Keras cannot trace for symbols."""

    def call(self, x):
        return super().call(tf.reduce_mean(x, axis=1))


class OfFourTuples(Net):
    """Batches that only the step can unpack."""

    def train_step(self, data):
        x, y, weights, shift = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x + shift), weights)
        trained = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, trained), trained)
        return {"loss": loss}


class Own(keras.layers.Layer):
    """A layer with a weight of its own."""

    def build(self, shape):
        self.kernel = self.add_weight(shape=(shape[-1], 3))

    def call(self, x):
        return x @ self.kernel


def _model(strategy, create, metrics="accuracy"):
    with scope(strategy):
        model = create()
        model.compile("sgd", cross_entropy(), metrics=metrics and [metrics])
    return model


def _functional():
    inputs = keras.Input((8,))
    return keras.Model(inputs, Own()(inputs))


def predicted(strategy, then):
    """Two models that `predict` builds, and then another one that is trained."""
    x, y = rows(14)
    compile_mlp(strategy)  # Keras knows no variables that wait for their values before it.
    predictions = []
    for _ in range(2):
        with scope(strategy):
            net = Net()
        predictions.append(net.predict(x[:7], verbose=0))
    model = _model(strategy, Net if then == "subclassed" else _functional)
    return outcome(model, fit(model, x, y, batch_size=6), predictions=predictions)


def by_each_call(strategy):
    """Models that each of Keras's calls builds; then all of them are trained."""
    x, y = rows(14)
    compile_mlp(strategy)
    nets = [_model(strategy, Net) for _ in range(5)]
    results = [
        nets[0].predict_on_batch(x),
        nets[1].evaluate(x, y, batch_size=6, verbose=0),
        nets[2].train_on_batch(x, y),
        nets[3].test_on_batch(x, y),
        fit(nets[4], x, y, batch_size=6),
    ]
    histories = [fit(net, x, y, batch_size=6) for net in nets]
    weights = [w for net in nets for w in net.get_weights()]
    return {"weights": weights, "history": histories, "results": results}


def by_ragged_batches(strategy):
    x, y = rows(14)
    lengths = np.arange(14) % 3 + 1
    ragged = tf.RaggedTensor.from_row_lengths(np.repeat(x, lengths, axis=0), lengths)
    data = tf.data.Dataset.from_tensor_slices((ragged, y)).batch(5)
    return _then_others(strategy, _model(strategy, OfRagged), data)


def by_four_tuples(strategy):
    x, y = rows(14)
    compile_mlp(strategy)
    weights = np.linspace(0.5, 1, 14).astype("float32")
    data = tf.data.Dataset.from_tensor_slices((x, y, weights, x[::-1])).batch(5)
    return _then_others(strategy, _model(strategy, OfFourTuples, metrics=None), data)


def _then_others(strategy, model, data):
    history = fit(model, data)
    x, y = rows(14)
    others = [_model(strategy, create) for create in (_functional, Net)]
    histories = [history, *(fit(other, x, y, batch_size=6) for other in others)]
    weights = [w for m in (model, *others) for w in m.get_weights()]
    return {"weights": weights, "history": histories}
