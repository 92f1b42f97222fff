"""Optimizers inside of others, side by side, and with methods of their own."""

from __future__ import annotations

import keras
import tensorflow as tf

import tfdist
from tests.strategy.behaviours.common import (
    compile_mlp,
    cross_entropy,
    fit,
    mlp,
    outcome,
    rows,
    scope,
)


def _multi():
    kernels, biases = keras.optimizers.SGD(0.1), keras.optimizers.SGD(0.7, momentum=0.5)
    return keras.optimizers.MultiOptimizer(
        lambda variable: kernels if "kernel" in variable.path else biases
    )


def several_in_one(strategy, scaled):
    """Two optimizers without anything that would hide a factor in the gradients."""
    if not hasattr(keras.optimizers, "MultiOptimizer"):
        return {}
    x, y = rows(30)

    def optimizer():
        return keras.optimizers.LossScaleOptimizer(_multi(), 64.0) if scaled else _multi()

    model = compile_mlp(strategy, optimizer)
    return outcome(model, fit(model, x, y, batch_size=11))


def several_in_one_compressed(strategy):
    """Whose gradients are compressed while the loss is scaled."""
    strategy = tfdist.MultiWorkerMirroredStrategy(compression="fp16") if strategy else None
    return several_in_one(strategy, True)


class Halves(keras.Model):
    """Trains its layers by optimizers side by side, scaling losses for one of them or none.

    Args:
        scaled: which of the two losses goes through the `scale_loss` of the first optimizer.
        one: whether that optimizer applies all gradients.
    """

    def __init__(self, scaled, one):
        super().__init__()
        self.first, self.second = keras.layers.Dense(16, "tanh"), keras.layers.Dense(3)
        self._scaled, self._one = scaled, one

    def build(self, shape):
        self.first.build(shape)
        self.second.build((None, 16))
        self.built = True

    def call(self, x):
        return self.second(self.first(x))

    def train_step(self, data):
        x, y = data
        layers = (self.first, self.second)
        others = (self.optimizer, self.optimizer if self._one else self.other)
        for number, (layer, optimizer) in enumerate(zip(layers, others, strict=True)):
            with tf.GradientTape() as tape:
                loss = self.compute_loss(x, y, self(x, training=True))
                if number in self._scaled:
                    loss = self.optimizer.scale_loss(loss)
            weights = layer.trainable_weights
            if self._one:
                weights = self.trainable_weights
            optimizer.apply(tape.gradient(loss, weights), weights)
        return {"loss": loss}


def losses_scaled_or_not(strategy, scaled, one):
    x, y = rows(30)
    with scope(strategy):
        model = Halves(scaled, one)
        model.build((None, 8))
        model.other = keras.optimizers.SGD(0.3)
        model.other.build(model.second.trainable_weights)
        model.compile(keras.optimizers.SGD(0.1), cross_entropy())
    return outcome(model, fit(model, x, y, batch_size=11))


class SignOfItsOwn(keras.optimizers.SGD):
    """Assigns by itself, and not what is linear in the gradients."""

    def apply(self, grads, trainable_variables=None):
        for gradient, variable in zip(grads, trainable_variables, strict=True):
            variable.assign_sub(self.learning_rate * keras.ops.sign(gradient))
        self._iterations.assign_add(1)


class PairsOfItsOwn(keras.optimizers.SGD):
    def apply_gradients(self, grads_and_vars):
        for gradient, variable in grads_and_vars:
            variable.assign_sub(self.learning_rate * gradient / keras.ops.norm(gradient))


class UpdatesOfItsOwn(keras.optimizers.SGD):
    def _backend_apply_gradients(self, grads, trainable_variables):
        grads = [keras.ops.sign(g) for g in grads]
        self._backend_update_step(grads, trainable_variables, self.learning_rate)


class Normalizing(keras.optimizers.SGD):
    """Changes gradients before Keras applies them."""

    def apply(self, grads, trainable_variables=None):
        super().apply([g / keras.ops.norm(g) for g in grads], trainable_variables)


class ClippingByItself(keras.optimizers.SGD):
    def _clip_gradients(self, grads):
        return [g / keras.ops.maximum(1.0, 20 * keras.ops.norm(g)) for g in grads]


class Around(keras.optimizers.SGD):
    """Hands gradients to another optimizer, in an attribute of a name that Keras knows."""

    def build(self, variables):
        super().build(variables)
        self.inner_optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
        self.inner_optimizer.build(variables)

    def apply(self, grads, trainable_variables=None):
        self.inner_optimizer.apply([g / keras.ops.norm(g) for g in grads], trainable_variables)


KINDS = {
    kind.__name__: kind
    for kind in (
        SignOfItsOwn,
        PairsOfItsOwn,
        UpdatesOfItsOwn,
        Normalizing,
        ClippingByItself,
        Around,
    )
}


def methods_of_its_own(strategy, kind, accumulated=False, eagerly=False):
    x, y = rows(30)
    more = {"gradient_accumulation_steps": 2} if accumulated else {}
    model = compile_mlp(strategy, lambda: KINDS[kind](0.05, **more), run_eagerly=eagerly)
    with scope(strategy):
        model.optimizer.build(model.trainable_variables)
    return outcome(model, fit(model, x, y, batch_size=11))


def updates_by_hand(strategy):
    """What a `train_step` assigns without an optimizer: averaged by rows, it is the same."""

    class ByHand(keras.Sequential):
        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                loss = self.compute_loss(x, y, self(x, training=True))
            for variable, gradient in zip(
                self.trainable_variables,
                tape.gradient(loss, self.trainable_variables),
                strict=True,
            ):
                variable.assign_sub(0.3 * gradient)
            return {"loss": loss}

    x, y = rows(30)
    with scope(strategy):
        model = ByHand([keras.Input((8,)), keras.layers.Dense(3)])
        model.compile(loss=cross_entropy())
    return outcome(model, fit(model, x, y, batch_size=11))


def no_rows_while_accumulating(strategy, own_step):
    """Those without rows in the step of the update have had some before."""

    class Mean(keras.Sequential):
        def train_step(self, data):
            x, _ = data
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(self(x, training=True)))
            gradients = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply(gradients, self.trainable_variables)
            return {"loss": loss}

    x, y = rows(4)
    with scope(strategy):
        kind = Mean if own_step else keras.Sequential
        model = kind([keras.Input((8,)), keras.layers.Dense(3)])
        model.compile(keras.optimizers.SGD(0.1, gradient_accumulation_steps=2), cross_entropy())
    model.fit(x, y, batch_size=3, epochs=2, verbose=0)
    return outcome(model)


@tf.custom_gradient
def _clipped_backwards(x):
    return x, lambda upstream: tf.clip_by_value(upstream, -0.02, 0.02)


def clipped_in_the_backward_pass(strategy):
    """In Keras's own step, called by a model's too, the backward pass is that of one process."""

    class Model(keras.Sequential):
        def train_step(self, data):
            return {"steps": self.optimizer.iterations, **super().train_step(data)}

    class Clip(keras.layers.Layer):
        def call(self, x):
            return _clipped_backwards(x)

    x, y = rows(40)
    with scope(strategy):
        model = Model([keras.Input((8,)), keras.layers.Dense(3), Clip()])
        model.compile(keras.optimizers.SGD(0.5), cross_entropy())
    return outcome(model, fit(model, x, y, batch_size=16))


def float8(strategy):
    x, y = rows(45, features=16)
    with scope(strategy):
        model = keras.Sequential(
            [
                keras.Input((16,)),
                keras.layers.Dense(16, "tanh", use_bias=False, dtype="float8_from_float32"),
                keras.layers.Dense(3, use_bias=False, dtype="float8_from_float32"),
            ]
        )
        model.compile(keras.optimizers.SGD(0.1), cross_entropy())
    return outcome(model, fit(model, x, y, batch_size=16))


def float8_in_an_own_step(strategy):
    class Own(keras.Sequential):
        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                loss = self.compute_loss(x, y, self(x, training=True))
            gradients = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply(gradients, self.trainable_variables)
            return {"loss": loss}

    x, y = rows(45)
    with scope(strategy):
        model = Own([keras.Input((8,)), keras.layers.Dense(16, dtype="float8_from_float32")])
        model.compile("sgd", cross_entropy())
    return outcome(model, fit(model, x, y, batch_size=16))


def applied_outside(strategy):
    """What a loop without `strategy.run` says, eagerly and in a function, and that others go on."""
    x, _ = rows(16)
    with scope(strategy):
        model = mlp()
        if hasattr(keras.optimizers, "MultiOptimizer"):
            several = _multi()
            several.build(model.trainable_variables)
        else:
            several = keras.optimizers.SGD()
        optimizers = [
            keras.optimizers.SGD(),
            keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD()),
            SignOfItsOwn(),
            PairsOfItsOwn(),
            several,
        ]
    made_outside = keras.optimizers.SGD()

    def step(optimizer):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(x) ** 2)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    errors = [_error(lambda o=o: step(o)) for o in (*optimizers, made_outside)]
    errors.append(_error(lambda: tf.function(lambda: step(optimizers[0]))()))
    # Alone it is nobody else's business.
    single = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
    alone = keras.optimizers.SGD()
    alone.apply([tf.ones(v.shape) for v in single.trainable_variables], single.trainable_variables)
    return errors


class Elementwise(SignOfItsOwn):
    elementwise = True


def shards_that_nobody_sums(strategy):
    x, y = rows(32)
    strategy = tfdist.MultiWorkerMirroredStrategy(shard_optimizer=True)
    model = compile_mlp(strategy, Elementwise)
    return _error(lambda: model.fit(x, y, verbose=0))


def _error(call):
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"
