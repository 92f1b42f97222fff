"""Optimizers and what they do to gradients."""

from __future__ import annotations

import keras
import numpy as np

from tests.strategy.behaviours.common import (
    compile_mlp,
    cross_entropy,
    fit,
    mlp,
    outcome,
    rows,
    scope,
)


def by_name(strategy, name):
    """Any of Keras's optimizers with its own settings; None where this Keras has none."""
    kind = getattr(keras.optimizers, name, None)
    if kind is None:
        return {"weights": None}
    x, y = rows(30)
    model = compile_mlp(strategy, kind)
    if name == "ScheduleFreeAdamW":
        with scope(strategy):
            # Built while Keras traces the first step, it starts anew at every step.
            model.optimizer.build(model.trainable_variables)
    return outcome(model, fit(model, x, y, batch_size=11))


def momentum_and_schedule(strategy):
    x, y = rows(40)

    def optimizer():
        schedule = keras.optimizers.schedules.CosineDecay(0.1, 10)
        return keras.optimizers.SGD(schedule, momentum=0.9, nesterov=True)

    model = compile_mlp(strategy, optimizer)
    return outcome(model, fit(model, x, y, batch_size=10))


def _clipped(strategy, **settings):
    x, y = rows(45)
    model = compile_mlp(strategy, lambda: keras.optimizers.SGD(0.5, **settings))
    return outcome(model, fit(model, 10 * x, y, batch_size=20))


def clipnorm(strategy):
    return _clipped(strategy, clipnorm=0.1)


def global_clipnorm(strategy):
    return _clipped(strategy, global_clipnorm=0.1)


def clipvalue(strategy):
    return _clipped(strategy, clipvalue=0.01)


def clipped_sparse_gradients(strategy):
    generator = np.random.default_rng(0)
    x, y = generator.integers(0, 6, (40, 4)), generator.integers(0, 3, 40)
    with scope(strategy):
        model = keras.Sequential(
            [
                keras.Input((4,), dtype="int32"),
                keras.layers.Embedding(6, 5),
                keras.layers.Flatten(),
                keras.layers.Dense(3),
            ]
        )
        model.compile(keras.optimizers.SGD(0.5, global_clipnorm=0.1), cross_entropy())
    return outcome(model, fit(model, x, y, batch_size=20))


def moving_average(strategy):
    x, y = rows(40)
    model = compile_mlp(
        strategy, lambda: keras.optimizers.Adam(0.01, use_ema=True, ema_overwrite_frequency=3)
    )
    return outcome(model, fit(model, x, y, batch_size=10))


def gradient_accumulation(strategy):
    x, y = rows(48)
    model = compile_mlp(
        strategy,
        lambda: keras.optimizers.Adam(0.01, gradient_accumulation_steps=2, global_clipnorm=0.1),
    )
    return outcome(model, fit(model, x, y, batch_size=8, epochs=3))


def gradient_accumulation_with_moving_average(strategy):
    x, y = rows(48)
    model = compile_mlp(
        strategy,
        lambda: keras.optimizers.SGD(0.1, gradient_accumulation_steps=3, use_ema=True),
    )
    return outcome(model, fit(model, x, y, batch_size=8))


def weight_decay_and_constraint(strategy):
    x, y = rows(40)
    with scope(strategy):
        model = keras.Sequential(
            [
                keras.Input((8,)),
                keras.layers.Dense(3, kernel_constraint=keras.constraints.UnitNorm()),
            ]
        )
        model.compile(keras.optimizers.AdamW(0.01, weight_decay=0.1), cross_entropy())
    return outcome(model, fit(model, x, y, batch_size=10))


def frozen_layers(strategy):
    x, y = rows(40)
    with scope(strategy):
        model = mlp()
        model.layers[0].trainable = False
        model.compile("sgd", cross_entropy())
    return outcome(model, fit(model, x, y, batch_size=10))


def loss_scaling(strategy):
    x, y = rows(45)
    model = compile_mlp(
        strategy,
        lambda: keras.optimizers.LossScaleOptimizer(
            keras.optimizers.SGD(0.1, global_clipnorm=0.5), initial_scale=64.0
        ),
    )
    return outcome(model, fit(model, x, y, batch_size=20))


def overflow_on_one_worker(strategy):
    x, y = rows(48)
    x[40] = np.inf  # A row of one worker: all must skip the step.
    model = compile_mlp(
        strategy,
        lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), initial_scale=64.0),
        metrics=[],
    )
    model.fit(x, y, batch_size=16, epochs=2, verbose=0, shuffle=False)
    scale = float(model.optimizer.dynamic_scale.numpy())
    return {"weights": model.get_weights(), "scale": scale}


def changed_learning_rate(strategy):
    x, y = rows(40)
    model = compile_mlp(strategy)
    first = fit(model, x, y, batch_size=10)
    model.optimizer.learning_rate = 0.5
    return outcome(model, [first, fit(model, x, y, batch_size=10)])


def mixed_bfloat16(strategy):
    return _mixed(strategy, "mixed_bfloat16")


def mixed_float16(strategy):
    return _mixed(strategy, "mixed_float16")


def _mixed(strategy, policy):
    # Half precision rounds by the order of a sum: only the decisions can be compared exactly.
    x, y = rows(48)
    keras.mixed_precision.set_dtype_policy(policy)
    try:
        model = compile_mlp(strategy, keras.optimizers.Adam)
        history = fit(model, x, y, batch_size=16)
    finally:
        keras.mixed_precision.set_dtype_policy("float32")
    return {
        "optimizer": type(model.optimizer).__name__,
        "loss": [round(loss, 1) for loss in history["loss"]],
        "dtypes": sorted({str(v.dtype) for v in model.weights}),
    }
