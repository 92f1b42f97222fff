"""What scripts do with models that is less usual, in stages and in one process."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from unittest import mock

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

import tfdist
from tests.strategy.failing_saves import save_twice
from tfdist._src.internals.variables import has_value
from tfdist._src.pipeline.runtime.train_step import StepRunner

ROWS, BATCH = 22, 10


def run(strategy, name):
    """Runs one of the scripts: what it returns, and the variables that this process holds."""
    keras.utils.set_random_seed(0)
    build, script, cut, compiled = SCRIPTS[name]
    scope = contextlib.nullcontext
    if strategy is None:
        model = whole = build()
    else:
        strategy = tfdist.HybridStrategy(pipeline_size=2, microbatches=4)
        scope = strategy.scope
        with scope():
            model = tfdist.PipelineModel(build, cuts=[cut])
        whole = model.partition.graph.model
    with scope():
        model.compile(**{"optimizer": keras.optimizers.SGD(0.1), "loss": "mse", **compiled()})
    told = script(model)
    weights = {i: np.array(v) for i, v in enumerate(whole.variables) if has_value(v)}
    return {"told": told, "own": weights}


def separate_draws(strategy, seeded):
    """Each rank makes the model by itself, by seeds of its own; the shared weights after a step."""
    keras.utils.set_random_seed(strategy.extended.worker_rank if not seeded else 0)
    inputs = keras.Input([4])
    shared = layers.Dense(4)
    outputs = shared(layers.Activation("tanh", name="cut")(shared(inputs)))
    model = keras.Model(inputs, outputs)
    strategy = tfdist.HybridStrategy(pipeline_size=2, microbatches=2)
    with strategy.scope():
        staged = tfdist.PipelineModel(model, cuts=["cut"])
        staged.compile("sgd", "mse")
    x = np.ones([4, 4], "float32")
    staged.train_on_batch(x, x)
    return [np.array(v) for v in shared.variables]


def times_traced(strategy):
    """How often the step is traced for batches of different numbers of rows."""
    build, _, cut, _ = SCRIPTS["shared_initializer"]
    strategy = tfdist.HybridStrategy(pipeline_size=2, microbatches=4)
    with strategy.scope():
        model = tfdist.PipelineModel(build, cuts=[cut])
        model.compile("sgd", "mse")
    x, y = np.ones([17, 6], "float32"), np.ones([17, 2], "float32")
    with mock.patch.object(
        StepRunner, "_step", autospec=True, side_effect=StepRunner._step
    ) as step:
        model.fit(x, y, batch_size=10, epochs=2, verbose=0)
        model.fit(x, y, batch_size=6, verbose=0)
    return step.call_count


def trainable_at_odds(strategy):
    """One worker freezes a layer of another one's too; the error."""
    build, _, cut, _ = SCRIPTS["shared_initializer"]
    strategy = tfdist.HybridStrategy(pipeline_size=2, microbatches=2)
    with strategy.scope():
        model = tfdist.PipelineModel(build, cuts=[cut])
        for layer in model.layers:
            if layer.name == "shared" and strategy.pipeline_rank == 1:
                layer.trainable = False
        try:
            model.compile("sgd", "mse")
        except ValueError as error:
            return str(error)
    return ""


def layers_in_two_models(strategy):
    """The error of a second model in stages of layers that a first one has."""
    strategy = tfdist.HybridStrategy(pipeline_size=2, microbatches=2)
    with strategy.scope():
        part = _mlp()
        tfdist.PipelineModel(part, cuts=["first"])
        try:
            tfdist.PipelineModel(
                lambda: keras.Sequential([keras.Input((6,)), part, _dense()]), balance="parameters"
            )
        except tfdist.errors.UnsupportedError as error:
            return str(error)
    return ""


def failing_to_write(strategy, folder):
    """As `save_twice`, of a model in stages."""
    strategy = tfdist.HybridStrategy(pipeline_size=2, microbatches=2)
    with strategy.scope():
        model = tfdist.PipelineModel(_mlp, cuts=["first"])
    return save_twice(model, folder)


def saving_twice(strategy, folder):
    """The chief saves the full model alone; what all read that save to the same path afterwards."""
    path = f"{folder}/model.keras"
    strategy = tfdist.HybridStrategy(pipeline_size=2, microbatches=2)
    with strategy.scope():
        model = tfdist.PipelineModel(_mlp, cuts=["first"])
    with model.full_model() as full:
        if full is not None:
            full.save(path)
    weights = [value + 1 for value in model.get_weights()]
    model.set_weights(weights)
    model.save(path)
    read = keras.models.load_model(path).get_weights()
    return all(np.array_equal(a, b) for a, b in zip(read, weights, strict=True))


def cloning(strategy):
    """The error of Keras's `clone_model`."""
    strategy = tfdist.HybridStrategy(pipeline_size=2, microbatches=2)
    with strategy.scope():
        model = tfdist.PipelineModel(_mlp, cuts=["first"])
    try:
        keras.models.clone_model(model)
    except NotImplementedError as error:
        return str(error)
    return ""


def saving_alone(strategy):
    """The chief saves, and the other one does not."""
    strategy = tfdist.HybridStrategy(pipeline_size=2, microbatches=2)
    with strategy.scope():
        model = tfdist.PipelineModel(_mlp, cuts=["first"])
    session = strategy.extended.group.session
    if strategy.extended.group.topology.is_chief:
        session._options = dataclasses.replace(session._options, collective_timeout=2.0)
        model.save("model.keras")
    else:
        time.sleep(5)


def fixed_rows(strategy):
    """The error of a model with a batch size of its own."""
    strategy = tfdist.HybridStrategy(pipeline_size=2, microbatches=2)
    with strategy.scope():
        try:
            tfdist.PipelineModel(
                lambda: keras.Sequential([keras.Input(batch_shape=(8, 3)), _dense(), _dense()])
            )
        except tfdist.errors.UnsupportedError as error:
            return str(error)
    return ""


def _dense(units=8, **arguments):
    return layers.Dense(units, activation="tanh", **arguments)


def _data(kind="numbers"):
    rng = np.random.default_rng(0)
    y = rng.normal(size=(ROWS, 2)).astype("float32")
    if kind == "tokens":
        return [rng.integers(4, size=(ROWS, 5)).astype("int32") for _ in range(2)], y
    if kind == "classes":
        return rng.normal(size=(ROWS, 6)).astype("float32"), np.eye(2)[rng.integers(2, size=ROWS)]
    return rng.normal(size=(ROWS, 6)).astype("float32"), y


def _fit(model, kind="numbers", epochs=2):
    x, y = _data(kind)
    given = {"batch_size": BATCH, "verbose": 0}
    history = model.fit(x, y, epochs=epochs, shuffle=False, **given).history
    logs = model.evaluate(x, y, return_dict=True, **given)
    return {"history": dict(sorted(history.items())), "logs": dict(sorted(logs.items()))}


def _mlp():
    return keras.Sequential([keras.Input((6,)), _dense(name="first"), _dense(), layers.Dense(2)])


def _classifier():
    return keras.Sequential(
        [keras.Input((6,)), _dense(name="first"), layers.Dense(2, activation="softmax")]
    )


def _untrained_end():
    return keras.Sequential([keras.Input((6,)), _dense(2, name="first"), layers.Activation("tanh")])


def _stopped():
    inputs = keras.Input((6,))
    x = layers.Lambda(tf.stop_gradient)(_dense(name="first")(inputs))
    return keras.Model(inputs, layers.Dense(2)(x))


def _frozen():
    model = _mlp()
    model.get_layer("first").trainable = False
    return model


def _shared_lookups():
    source, target = keras.Input((5,), dtype="int32"), keras.Input((5,), dtype="int32")
    embedding = layers.Embedding(4, 6)
    x = layers.Dense(6, name="first")(layers.Flatten()(embedding(source)))
    y = layers.Flatten()(embedding(target))
    return keras.Model([source, target], layers.Dense(2)(layers.Concatenate()([x, y])))


def _lookups():
    inputs = [keras.Input((5,), dtype="int32") for _ in range(2)]
    x = layers.Concatenate()([layers.Flatten()(layers.Embedding(4, 6)(i)) for i in inputs])
    return keras.Model(inputs, layers.Dense(2)(_dense(name="first")(x)))


def _normal(shape, dtype=None):
    """An initializer of the user's own, that draws from Keras's common generator."""
    return keras.random.normal(shape, dtype=dtype) * 0.3


def _shared_initializer():
    inputs = keras.Input((6,))
    shared = layers.Dense(6, kernel_initializer=_normal, name="shared")
    x = shared(layers.Dense(6, kernel_initializer=_normal)(inputs))
    x = shared(layers.Activation("tanh", name="first")(x))
    return keras.Model(inputs, layers.Dense(2, kernel_initializer=_normal)(x))


class _Watched(layers.Layer):
    """Has a metric of its own."""

    def __init__(self, name):
        super().__init__(name=name)
        self.mean = keras.metrics.Mean(name=f"size_of_{name}")

    def call(self, x):
        self.mean.update_state(ops.mean(ops.abs(x)))
        return x


def _watched():
    return keras.Sequential(
        [keras.Input((6,)), _dense(), _Watched("first"), _Watched("second"), layers.Dense(2)]
    )


def _wide():
    flat = layers.Flatten(name="first")
    return keras.Sequential(
        [keras.Input((1024, 1024, 1)), flat, layers.Dense(1, kernel_initializer="zeros")]
    )


def _words():
    inputs = keras.Input((), dtype="string")
    numbers = layers.StringLookup(vocabulary=["a", "b", "c"])(inputs)
    return keras.Model(inputs, layers.Dense(2)(layers.Embedding(5, 4, name="first")(numbers)))


class _TwoResults(keras.metrics.Metric):
    """A metric with two results."""

    def __init__(self):
        super().__init__(name="two")
        self.sum = self.add_weight(name="sum", initializer="zeros")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.sum.assign_add(ops.sum(ops.abs(y_true - y_pred)))

    def result(self):
        return {"once": self.sum * 1.0, "twice": self.sum * 2.0}


def _mean_error(y_true, y_pred):
    return ops.mean(ops.abs(y_true - y_pred))


def _set_first(model, trainable):
    for layer in model.layers:  # Of this rank's stages.
        if layer.name == "first":
            layer.trainable = trainable
    model.compile("sgd", "mse")
    return _fit(model)


def _fit_wide(model):
    x = np.full((4, 1024, 1024, 1), 1e-6, "float32")
    return model.fit(x, np.ones([4, 1]), batch_size=4, verbose=0).history


def _fit_words(model):
    x = tf.constant(["a", "b", "c", "d"] * 4)
    data = tf.data.Dataset.from_tensor_slices((x, np.ones([16, 2]))).batch(8)
    return model.fit(data, verbose=0).history


def _nothing():
    return {}


def _tokens(model):
    return _fit(model, "tokens")


def _sgd(**settings):
    return lambda: {"optimizer": keras.optimizers.SGD(0.1, **settings)}


def _adam(**settings):
    return lambda: {"optimizer": keras.optimizers.Adam(0.01, epsilon=1e-3, **settings)}


# name -> the model, what is done with it, the layer with which its first stage ends, how it is
# compiled.
SCRIPTS = {
    "a_metric_of_one_number": (_mlp, _fit, "first", lambda: {"metrics": [_mean_error]}),
    "a_metric_of_several_numbers": (
        _classifier,
        lambda model: _fit(model, "classes"),
        "first",
        lambda: {"loss": "categorical_crossentropy", "metrics": [keras.metrics.F1Score()]},
    ),
    "a_metric_of_two_results": (_mlp, _fit, "first", lambda: {"metrics": [_TwoResults()]}),
    "metrics_of_layers": (_watched, _fit, "first", _nothing),
    "an_unreduced_loss": (
        _mlp,
        _fit,
        "first",
        lambda: {
            "optimizer": keras.optimizers.SGD(0.001),
            "loss": keras.losses.MeanSquaredError(reduction="none"),
        },
    ),
    "freezing_a_layer": (_mlp, lambda model: _set_first(model, False), "first", _nothing),
    "unfreezing_a_layer": (
        _frozen,
        lambda model: [_fit(model), _set_first(model, True)],
        "first",
        _nothing,
    ),
    "stopped_gradients": (
        _stopped,
        _fit,
        "first",
        lambda: {"optimizer": keras.optimizers.AdamW(0.01, weight_decay=0.1)},
    ),
    "shared_initializer": (_shared_initializer, _fit, "first", _nothing),
    "shared_lookups": (_shared_lookups, _tokens, "first", _adam()),
    "shared_lookups_clipped": (_shared_lookups, _tokens, "first", _sgd(global_clipnorm=0.1)),
    "clipped_lookups": (_lookups, _tokens, "first", _adam(global_clipnorm=0.5)),
    "accumulating_untrained": (
        _untrained_end,
        _fit,
        "first",
        _sgd(gradient_accumulation_steps=2, global_clipnorm=0.01),
    ),
    "values_of_a_million_numbers": (
        _wide,
        _fit_wide,
        "first",
        _nothing,
    ),
    "words": (_words, _fit_words, "first", _nothing),
}


def calls_that_only_order(strategy, schedule):
    """How often Python functions of a layer are called in each pass, whose results do not count."""
    calls = {"forward": 0, "backward": 0}

    def counted(name, tensor):
        def call():
            calls[name] += 1
            return np.int32(0)

        with tf.control_dependencies([tensor]):
            done = tf.numpy_function(call, [], tf.int32)
        with tf.control_dependencies([done]):
            return tf.identity(tensor)

    class Counting(keras.layers.Layer):
        def call(self, x, training=None):
            @tf.custom_gradient
            def identity(x):
                return counted("forward", x), lambda gradient: counted("backward", gradient)

            return identity(x) if training else x

    def build():
        dense = keras.layers.Dense
        return keras.Sequential(
            [keras.Input((4,)), dense(8), Counting(), dense(8, name="cut"), Counting(), dense(1)]
        )

    strategy = tfdist.PipelineStrategy(microbatches=2, schedule=schedule)
    with strategy.scope():
        model = tfdist.PipelineModel(build, cuts=["cut"])
        model.compile("sgd", "mse")
    x = np.ones((12, 4), "float32")
    model.fit(x, x[:, :1], batch_size=4, verbose=0)
    return calls
