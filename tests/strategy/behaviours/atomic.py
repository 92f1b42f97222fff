"""Trainings in which worker 1 dies in a step, and the state that the others are left in."""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
from unittest import mock

import keras
import numpy as np
import tensorflow as tf

import tfdist
from tests.strategy.behaviours.common import cross_entropy, fit, mlp, outcome, rows, scope
from tests.strategy.behaviours.hooks import calling_before, running
from tfdist._src.comm import native_ops, tokens
from tfdist._src.sharding import sharded_by

BATCH = 12
BATCHES = 7
_COLLECTIVES = ("all_reduce", "compressed_all_reduce", "reduce_scatter", "all_gather")


def undisturbed(strategy, case):
    """Trains.

    Returns:
        The state before the first step and after each, for each step the numbers of its
        collectives in the program, and how many steps count.
    """
    strategy, model = _make(strategy, case)
    before, states, steps = _steps_before(strategy), [], []
    record = keras.callbacks.LambdaCallback(
        on_train_batch_begin=lambda batch, logs: None if batch else states.append(_state(model)),
        on_train_batch_end=lambda batch, logs: states.append(_state(model)),
    )

    def note(name, number):
        if name == "rows":
            steps.append([])
        if steps:
            steps[-1].append(number)

    with _hooked(note):
        _fit(model, case, record)
    return states, steps, _steps_before(strategy) - before


def until(strategy, case, step, collective):
    """Trains; in a step, worker 1 dies before one of the collectives.

    Args:
        case: what to train.
        step: the number of the step.
        collective: its number in the program; None for after all, when variables are updated.

    Returns:
        The state after the error, how many steps count, and whether the state is torn.
    """
    strategy, model = _make(strategy, case)
    dies = strategy.extended.worker_rank == 1
    taken = -1

    def count(name, number):
        nonlocal taken
        taken += name == "rows"
        if dies and taken == step and number == collective:
            os.kill(os.getpid(), signal.SIGKILL)

    def die_at_last():
        if dies and taken == step:
            os.kill(os.getpid(), signal.SIGKILL)

    before = _steps_before(strategy)
    with contextlib.ExitStack() as hooks:
        # On both workers, which must have the same program.
        hooks.enter_context(_hooked(count))
        if collective is None:
            hooks.enter_context(calling_before(tokens, "commits", die_at_last))
        try:
            _fit(model, case)
        except tf.errors.UnavailableError:
            progress = strategy.extended.progress
            return _state(model), progress.committed_steps - before, progress.torn
    return None


def _steps_before(strategy):
    return strategy.extended.progress.committed_steps


@contextlib.contextmanager
def _hooked(call):
    """Calls a function before each collective of a step, with its name and its number."""
    number = -1

    def hook(name, collective):
        def hooked(*args, **kwargs):
            nonlocal number
            key = args[-1] if name != "all_reduce" else args[4]
            number = 0 if key == "rows" else number + 1
            this = (key or name, number)
            with running(lambda: call(*this)):
                return collective(*args, **kwargs)

        return hooked

    with contextlib.ExitStack() as patches:
        for name in _COLLECTIVES:
            original = getattr(native_ops, name)
            patches.enter_context(mock.patch.object(native_ops, name, hook(name, original)))
        yield


def _state(model):
    """A digest of each variable's value on this worker."""
    variables = [*model.variables, *model.metrics_variables]
    for optimizer in _optimizers(model):
        variables += optimizer.variables
        inner = getattr(optimizer, "inner_optimizer", optimizer)
        state = getattr(inner, "compression_state", None)
        variables += [] if state is None else state.variables
        sharded = sharded_by(optimizer)
        variables += [] if sharded is None else sharded.shards
    values = [v.value if isinstance(v, keras.Variable) else v for v in variables]
    copies = [v.values[0] if hasattr(v, "values") else v for v in values]
    return [
        f"{v.name} {hashlib.sha256(np.asarray(v.numpy()).tobytes()).hexdigest()}" for v in copies
    ]


def _optimizers(model):
    return [v for v in vars(model).values() if isinstance(v, keras.optimizers.Optimizer)]


def _fit(model, case, *callbacks):
    x, y = rows(BATCH * BATCHES - 5)
    model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0, callbacks=list(callbacks), epochs=1)


def _make(strategy, case):
    """A strategy and a compiled model for a case."""
    settings = {}
    if case in ("int8", "topk", "powersgd"):
        codec = {
            "int8": lambda: tfdist.compression.Int8(error_feedback=True),
            "topk": lambda: tfdist.compression.TopK(0.1),
            "powersgd": lambda: tfdist.compression.PowerSGD(warmup_steps=2),
        }[case]()
        settings["compression"] = tfdist.compression.Policy(codec, smallest=16, within_hosts=True)
    if case.startswith("sharded"):
        settings["shard_optimizer"] = True
    if settings:
        strategy = tfdist.MultiWorkerMirroredStrategy(**settings)
    for communicator in strategy.extended.replicas:
        communicator.bucket_bytes = 256  # several buckets
    with scope(strategy):
        model = _model(case)
        compiled = {"run_eagerly": "eager" in case}
        if case == "several steps":
            compiled["steps_per_execution"] = 3
        optimizer = _optimizer(case)

        def iterations(y_true, y_pred):
            return tf.cast(optimizer.iterations, tf.float32)

        metrics = ["accuracy", *([iterations] if case == "iterations read" else [])]
        model.compile(optimizer, cross_entropy(), metrics=metrics, **compiled)
    return strategy, model


def _model(case):
    layers = [
        keras.layers.Dense(16, activation="tanh"),
        keras.layers.BatchNormalization(),
        keras.layers.Dropout(0.3, seed=3),
        keras.layers.Dense(3),
    ]
    if case == "large variables":  # which are updated one after the other
        layers = [*(keras.layers.Dense(512, activation="tanh") for _ in range(3)), *layers]
    inputs = keras.Input((8,))
    outputs = keras.Sequential(layers)(inputs)
    kind = {"two optimizers": TwoOptimizers}.get(case, keras.Model)
    return kind(inputs, outputs)


def _optimizer(case):
    adam = keras.optimizers.Adam
    if case.endswith("accumulation"):
        return adam(0.01, gradient_accumulation_steps=3)
    if case.endswith("loss scaling"):
        return keras.optimizers.LossScaleOptimizer(
            adam(0.01), initial_scale=4.0, dynamic_growth_steps=2
        )
    if case == "averages":
        return adam(0.01, use_ema=True, ema_overwrite_frequency=3, global_clipnorm=0.5)
    return adam(0.01)


class TwoOptimizers(keras.Model):
    """A custom step whose second loss is computed with what the first one's optimizer has done."""

    def compile(self, optimizer, loss, metrics, **kwargs):
        # Keras fails if a step does not update the metrics that it was compiled with.
        super().compile(optimizer, loss, **kwargs)
        self.second = keras.optimizers.SGD(0.1, momentum=0.9)

    def train_step(self, data):
        x, y = data
        for optimizer in (self.optimizer, self.second):
            with tf.GradientTape() as tape:
                loss = self.compute_loss(x, y, self(x, training=True))
            gradients = tape.gradient(loss, self.trainable_variables)
            optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return {"loss": loss}


def metric_of_iterations(strategy):
    """A metric that sees how far the optimizer is, after the update and not before it."""
    x, y = rows(40)
    with scope(strategy):
        model = mlp()
        optimizer = keras.optimizers.Adam(0.01)

        def iterations(y_true, y_pred):
            return tf.cast(optimizer.iterations, tf.float32) * tf.ones(tf.shape(y_true)[0])

        model.compile(optimizer, cross_entropy(), metrics=["accuracy", iterations])
    return outcome(model, fit(model, x, y, batch_size=10))


def metric_of_learning_rate(strategy):
    """The learning rate changes by no update, unless it follows a schedule."""
    x, y = rows(40)
    with scope(strategy):
        model = mlp()
        schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 1, 0.5)
        optimizer = keras.optimizers.SGD(schedule)

        def rate(y_true, y_pred):
            return optimizer.learning_rate * tf.ones(tf.shape(y_true)[0])

        model.compile(optimizer, cross_entropy(), metrics=[rate])
    return outcome(model, fit(model, x, y, batch_size=10))


class UsingWeights(keras.Model):
    """What comes after Keras's step sees the new weights, and changes them."""

    def train_step(self, data):
        logs = super().train_step(data)
        norm = tf.linalg.global_norm([tf.convert_to_tensor(v) for v in self.trainable_variables])
        for variable in self.trainable_variables:
            variable.assign(variable / tf.maximum(norm, 1.0))
        return {**logs, "norm": norm}


def weights_used_after_the_step(strategy):
    x, y = rows(40)
    with scope(strategy):
        inputs = keras.Input((8,))
        model = UsingWeights(inputs, mlp()(inputs))
        model.compile(keras.optimizers.Adam(0.1), cross_entropy())
    return outcome(model, fit(model, x, y, batch_size=10))


class InABranch(keras.Model):
    """Applies gradients inside a conditional."""

    def train_step(self, data):
        return tf.cond(
            tf.shape(data[0])[0] > 0,
            lambda: super(InABranch, self).train_step(data),
            lambda: super(InABranch, self).train_step(data),
        )


def step_in_a_branch(strategy):
    x, y = rows(40)
    with scope(strategy):
        inputs = keras.Input((8,))
        model = InABranch(inputs, mlp()(inputs))
        model.compile(keras.optimizers.Adam(0.1), cross_entropy())
        model.optimizer.build(model.trainable_variables)
    return outcome(model, fit(model, x, y, batch_size=10))


class Remembering(keras.Model):
    """Makes a variable in its first step, from a value that only the step computes."""

    first = None

    def train_step(self, data):
        logs = super().train_step(data)
        if self.first is None:
            self.first = tf.Variable(self.source() * 2.0)
        self.first.assign_add(1.0)
        return logs

    def source(self):
        return tf.convert_to_tensor(self.optimizer.learning_rate)


class RememberingWeights(Remembering):
    def source(self):
        return tf.reduce_sum(self.trainable_variables[0])


def _remember(strategy, kind):
    x, y = rows(40)
    with scope(strategy):
        inputs = keras.Input((8,))
        model = kind(inputs, mlp()(inputs))
        model.compile(keras.optimizers.Adam(0.1), cross_entropy())
    return outcome(model, fit(model, x, y, batch_size=10), first=float(model.first.numpy()))


def variable_made_from_another(strategy):
    return _remember(strategy, Remembering)


def made_from_what_is_updated(strategy, _):
    try:
        _remember(strategy, RememberingWeights)
    except tfdist.errors.UnsupportedError as error:
        return str(error)
    return "no error"
