"""What Keras can do, each in a training that loses a worker or gets another one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfdist
from tests.recovery.behaviours.surviving import Dying, Fault, come
from tests.strategy.behaviours.common import cross_entropy, rows, scope

layers = keras.layers


class Doubling(keras.Model):
    """A model with a training step of its own."""

    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        weights = self.trainable_variables
        gradients = [2 * gradient for gradient in tape.gradient(loss, weights)]
        self.optimizer.apply(gradients, weights)
        return self.compute_metrics(x, y, self(x, training=True), None) | {"own": loss}


class InTurns(keras.Model):
    """A model whose training step has an optimizer of its own for the last layer."""

    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as tape:
            z = self(x, training=True)
            loss = self.compute_loss(x, y, z)
        weights = self.trainable_variables
        gradients = tape.gradient(loss, weights)
        self.optimizer.apply(gradients[:-2], weights[:-2])
        self.another.apply(gradients[-2:], weights[-2:])
        return self.compute_metrics(x, y, z, None) | {"own": loss}


class Counting(layers.Layer):
    """A layer with state that changes in training: how often it was called."""

    def build(self, shape: Any) -> None:
        self.calls = self.add_weight(shape=(), dtype="int32", trainable=False, name="calls")

    def call(self, x: Any, training: bool = False) -> Any:
        if training:
            self.calls.assign_add(1)
        return x


class Greedy(keras.losses.Loss):
    """Not the mean over rows: the largest row's loss counts twice."""

    def call(self, y: Any, z: Any) -> Any:
        each = keras.losses.sparse_categorical_crossentropy(y, z, from_logits=True)
        return tfdist.global_batch.rows(each)


def mlp(*more: Any, dropout: bool = True, kind: Any = keras.Model) -> keras.Model:
    x = inputs = keras.Input((8,))
    x = layers.Dense(16, activation="tanh")(x)
    for layer in more:
        x = layer(x)
    x = layers.Dropout(0.25, seed=3)(x) if dropout else x
    return kind(inputs, layers.Dense(3)(Dying()(x)))


def compiled(model: keras.Model, **settings: Any) -> keras.Model:
    settings = {"optimizer": keras.optimizers.Adam(0.01), "loss": cross_entropy(), **settings}
    settings.setdefault("metrics", ["accuracy"])
    model.compile(**settings)
    return model


def two_outputs() -> keras.Model:
    inputs = keras.Input((8,), name="x")
    x = Dying()(layers.Dense(16, activation="tanh")(inputs))
    one, two = layers.Dense(3, name="one")(x), layers.Dense(1, name="two")(x)
    model = keras.Model(inputs, {"one": one, "two": two})
    return compiled(
        model,
        loss={"one": cross_entropy(), "two": "mse"},
        loss_weights={"one": 1.0, "two": 0.3},
        metrics={"one": ["accuracy"], "two": ["mae", keras.metrics.RootMeanSquaredError()]},
    )


def recurrent() -> keras.Model:
    inputs = keras.Input((8,))
    x = layers.Reshape((4, 2))(inputs)
    x = layers.GRU(6, dropout=0.2, recurrent_dropout=0.1, seed=2)(x)
    return compiled(keras.Model(inputs, layers.Dense(3)(Dying()(x))))


def stateful() -> keras.Model:
    inputs = keras.Input(batch_shape=(5, 8))
    x = layers.LSTM(6, stateful=True)(layers.Reshape((4, 2))(inputs))
    return compiled(keras.Model(inputs, layers.Dense(3)(Dying()(x))))


def embedded() -> keras.Model:
    inputs = keras.Input((8,))
    x = layers.Lambda(lambda x: keras.ops.cast(keras.ops.abs(5 * x), "int32") % 20)(inputs)
    x = layers.Flatten()(layers.Embedding(20, 4)(x))
    return compiled(keras.Model(inputs, layers.Dense(3)(Dying()(x))))


def regularized() -> keras.Model:
    l2 = keras.regularizers.L2(0.01)
    constrained = keras.constraints.MaxNorm(1.0)
    extra = layers.Dense(8, kernel_regularizer=l2, kernel_constraint=constrained)
    return compiled(mlp(extra, layers.ActivityRegularization(0.01)))


def two_optimizers() -> keras.Model:
    model = compiled(mlp(kind=InTurns))
    model.another = schedule(use_ema=True)
    model.optimizer.build(model.trainable_variables[:-2])
    model.another.build(model.trainable_variables[-2:])
    return model


def many_metrics() -> keras.Model:
    one = keras.metrics.SparseCategoricalCrossentropy(from_logits=True, name="ce")
    top = keras.metrics.SparseTopKCategoricalAccuracy(k=2, name="top")
    return compiled(mlp(), metrics=["accuracy", top, one], weighted_metrics=["accuracy"])


def schedule(**settings: Any) -> Any:
    decay = keras.optimizers.schedules.ExponentialDecay(0.05, 3, 0.8)
    return keras.optimizers.SGD(decay, momentum=0.9, **settings)


def simple() -> keras.Model:
    return compiled(mlp())


def slower(epoch: int, rate: float) -> float:
    return rate * 0.7


def swap() -> Any:
    return keras.callbacks.SwapEMAWeights(swap_on_epoch=True)


X, Y = rows(50)
ARRAYS = {"x": X, "y": Y, "batch_size": 8, "shuffle": False}
WEIGHTED = {**ARRAYS, "sample_weight": np.linspace(0.1, 2, 50)}


def shuffled(size: int = 8, **settings: Any) -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(50, seed=5).batch(size, **settings)


def augmented(x: Any, y: Any) -> Any:
    return x + 0.1 * tf.random.stateless_normal(tf.shape(x), seed=tf.cast(y[:2], tf.int32)), y


Feature = tuple[Callable[[], keras.Model], dict[str, Any], Callable[[], list[Any]]]

FEATURES: dict[str, Feature] = {
    "a train_step": (lambda: compiled(mlp(kind=Doubling)), {}, list),
    "state in a layer": (lambda: compiled(mlp(Counting())), {}, list),
    "layers that draw": (
        lambda: compiled(mlp(layers.GaussianNoise(0.2, seed=4), layers.AlphaDropout(0.1, seed=5))),
        {},
        list,
    ),
    "normalization": (
        lambda: compiled(
            mlp(layers.BatchNormalization(synchronized=True), layers.UnitNormalization())
        ),
        {},
        list,
    ),
    "regularizers and constraints": (regularized, {}, list),
    "two outputs": (
        two_outputs,
        {**ARRAYS, "y": {"one": Y, "two": X[:, :1]}},
        list,
    ),
    "two optimizers": (two_optimizers, {}, list),
    "recurrent": (recurrent, {}, list),
    "a state for each row": (
        stateful,
        {
            "dataset": lambda: shuffled(5, drop_remainder=True),
            "validation_data": rows(20, seed=1),
            "validation_batch_size": 5,
        },
        list,
    ),
    "embedding": (embedded, {}, list),
    "many metrics": (many_metrics, WEIGHTED, list),
    "class weights": (simple, {"class_weight": {0: 1.0, 1: 0.5, 2: 2.0}}, list),
    "validation split": (
        simple,
        {**ARRAYS, "validation_split": 0.2},
        list,
    ),
    "validation now and then": (simple, {"validation_freq": 2, "validation_steps": 2}, list),
    "eagerly": (lambda: compiled(mlp(), run_eagerly=True), {}, list),
    "several steps at once": (lambda: compiled(mlp(), steps_per_execution=4), {}, list),
    "learning rate schedule": (lambda: compiled(mlp(), optimizer=schedule()), {}, list),
    "loss scale": (
        lambda: compiled(mlp(), optimizer=keras.optimizers.LossScaleOptimizer(schedule())),
        {},
        list,
    ),
    "averages and clipping": (
        lambda: compiled(mlp(), optimizer=schedule(use_ema=True, global_clipnorm=0.3)),
        {},
        lambda: [swap()],
    ),
    "rows from all workers": (lambda: compiled(mlp(), loss=Greedy()), {}, list),
    "augmented in the dataset": (simple, {"map": augmented}, list),
    "rates by epochs": (
        simple,
        {},
        lambda: [
            keras.callbacks.LearningRateScheduler(slower),
            keras.callbacks.TerminateOnNaN(),
        ],
    ),
    "rates by plateaus": (
        simple,
        {},
        lambda: [
            keras.callbacks.ReduceLROnPlateau(monitor="loss", patience=0, min_delta=10.0),
            keras.callbacks.EarlyStopping(patience=5, restore_best_weights=True),
        ],
    ),
    "stopping early": (
        simple,
        {},
        lambda: [keras.callbacks.EarlyStopping("loss", patience=0, min_delta=10.0)],
    ),
    "warmup": (
        simple,
        {},
        lambda: [tfdist.callbacks.LearningRateWarmup(steps=12)],
    ),
}


def trained(strategy: Any, settings: dict[str, Any], faults: dict[int, Any]) -> dict[str, Any]:
    """Trains with what `settings["feature"]` names."""
    make, data, callbacks_of = FEATURES[settings["feature"]]
    me = tfdist.rank() if strategy else 0
    fault = faults.get(me) if strategy else None
    Dying.counts = strategy is not None
    if fault is not None and fault[0] in ("forward", "backward"):
        Dying.phase, Dying.step = fault[:2]
    with scope(strategy):
        model = make()
    callbacks = callbacks_of()
    if fault is not None:
        callbacks.append(Fault(*fault))
    if strategy:
        callbacks.append(tfdist.callbacks.Elastic())
    callbacks += settings.get("more", list)()
    given = dict(data)
    if "y" not in data:
        dataset = given.pop("dataset", shuffled)()
        given["x"] = dataset.map(given.pop("map", lambda *batch: batch))
    if not {"validation_split", "validation_data", "y"} & set(data):
        given["validation_data"] = rows(20, seed=1)
        given["validation_batch_size"] = 8
    history = model.fit(**given, epochs=3, verbose=0, callbacks=callbacks)
    return {
        "weights": model.get_weights(),
        "slots": [np.asarray(variable) for variable in model.optimizer.variables],
        "history": dict(history.history),
        "epochs": history.epoch,
    }


def coming(_: Any, *arguments: Any) -> Any:
    """Trains on some of the workers, to which another one comes."""
    return come(trained, *arguments)
