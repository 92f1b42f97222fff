"""State that code between the steps assigns, on one worker only or on all."""

from __future__ import annotations

import itertools
import time
from unittest import mock

import keras
import numpy as np
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
from tfdist._src.keras.fit import compared_state


def own_state_of_another_model(strategy):
    """Trains a model, after the accumulated gradients of another one were assigned."""
    x, y = rows(45)
    adam = keras.optimizers.Adam
    other = compile_mlp(strategy, lambda: adam(gradient_accumulation_steps=4))
    fit(other, x[:24], y[:24], batch_size=8, epochs=1)
    for variable in other.optimizer._accumulated_gradients:
        variable.assign(variable + 1.0)
    model = compile_mlp(strategy)
    return outcome(model, fit(model, x, y, batch_size=8))


class Stepping(keras.Model):
    """A model with two optimizers, and a variable that its step reads."""

    def __init__(self):
        super().__init__()
        self.net = mlp()
        self.other = keras.optimizers.SGD(0.1, name="other")
        self.factor = tf.Variable(1.0, name="factor")
        self.last = keras.layers.BatchNormalization()

    def call(self, x, training=False):
        return self.last(self.net(x), training=training)

    def train_step(self, data):
        x, y, *_ = data
        with tf.GradientTape(persistent=True) as tape:
            loss = self.factor * self.compute_loss(y=y, y_pred=self(x, training=True))
        first, rest = self.net.trainable_variables[:2], self.net.trainable_variables[2:]
        self.optimizer.apply(tape.gradient(loss, first), first)
        self.other.apply(tape.gradient(loss, rest), rest)
        return {"loss": loss}


# What is assigned, and the name that an error has for it.
ASSIGNED = {
    "learning rate": (lambda m: setattr(m.optimizer, "learning_rate", 0.5), "sgd/learning_rate"),
    "second optimizer": (lambda m: m.other.learning_rate.assign(0.5), "other/learning_rate"),
    "weight": (lambda m: m.net.layers[0].bias.assign_add(tf.ones(16)), "bias"),
    "weights": (lambda m: m.set_weights([w + 0.5 for w in m.get_weights()]), "kernel"),
    "statistics": (lambda m: m.last.moving_mean.assign(tf.ones(3)), "moving_mean"),
    "variable": (lambda m: m.factor.assign(3.0), "factor"),
    "rows": (lambda m: m.net.layers[0].kernel.value.scatter_nd_update([[0, 0]], [9.0]), "kernel"),
}

# The call after which a callback, or what comes before the next call, assigns.
PLACES = ("epoch", "batch", "fit", "evaluate", "predict", "train_on_batch")


def _train(strategy, what, place, assigns):
    """Trains, and assigns once; what is returned before and after.

    Args:
        strategy: or None for one process.
        what: a key of `ASSIGNED`.
        place: one of `PLACES`.
        assigns: whether this worker does.
    """
    with scope(strategy):
        model = Stepping()
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(0.1, name="sgd"), loss)
        model(tf.zeros([1, 8])) if strategy is None else None
    x, y = rows(24)
    done = []

    def assign(*_):
        if assigns and not done:
            ASSIGNED[what][0](model)
        done.append(True)

    class Assigning(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            if place == "epoch":
                assign()

        def on_train_batch_end(self, batch, logs=None):
            if place == "batch" and batch == 1:
                assign()

    history = fit(model, x, y, batch_size=8, callbacks=[Assigning()])
    if place in PLACES[2:]:
        assign()
    results = {
        "train_on_batch": lambda: model.train_on_batch(x, y),
        "evaluate": lambda: model.evaluate(x, y, verbose=0),
        "predict": lambda: model.predict(x, verbose=0),
    }.get(place, lambda: fit(model, x, y, batch_size=8))()
    return outcome(model, history, results=results)


def assigned_by_all(strategy, what, place):
    return _train(strategy, what, place, True)


def assigned_by_one(strategy, what, place):
    """The error; "" if there is none."""
    try:
        _train(strategy, what, place, strategy.extended.worker_rank == 1)
    except tfdist.errors.ReplicaMismatchError as error:
        return str(error)
    return ""


def assigned_by_one_while_sharded(strategy):
    """The error where the optimizer's state is in shards; "" if there is none."""
    sharded = tfdist.MultiWorkerMirroredStrategy(shard_optimizer=True)
    model = compile_mlp(sharded, keras.optimizers.Adam)
    x, y = rows(24)
    fit(model, x, y, batch_size=8)
    if strategy.extended.worker_rank == 1:
        model.optimizer.learning_rate = 0.5
    try:
        fit(model, x, y, batch_size=8)
    except tfdist.errors.ReplicaMismatchError as error:
        return str(error)
    return ""


def assigned_as_it_was(strategy):
    """One worker assigns the values that its variables have."""
    model = compile_mlp(strategy, keras.optimizers.Adam)
    x, y = rows(24)
    history = [fit(model, x, y, batch_size=8)]
    if strategy and strategy.extended.worker_rank == 1:
        model.set_weights(model.get_weights())
        model.optimizer.learning_rate = float(model.optimizer.learning_rate)
    return outcome(model, [*history, fit(model, x, y, batch_size=8)])


def changed_behind(strategy):
    """The error where a worker changes its copy of a weight, which nothing notices."""
    model = compile_mlp(strategy)
    x, y = rows(24)
    fit(model, x, y, batch_size=8)
    if strategy.extended.worker_rank == 1:
        copy = model.layers[0].kernel.value.values[0]
        copy.assign(copy + 1e-6)
    try:
        fit(model, x, y, batch_size=8)
    except tfdist.errors.ReplicaMismatchError as error:
        return str(error)
    return ""


def changed_within_an_epoch(strategy, what):
    """The error where a worker changes state that nothing notices, and after how many batches.

    Args:
        strategy: the strategy.
        what: "weight", or "outside" for a variable outside of the scope.
    """
    factor = tf.Variable(1.0)
    with scope(strategy):
        model = mlp()
        loss = cross_entropy()
        model.compile("sgd", lambda y, p: factor * loss(y, p))
    done = []

    def change(batch, logs):
        done.append(batch)
        if batch == 4 and strategy.extended.worker_rank == 1:
            copy = factor if what == "outside" else model.layers[0].kernel.value.values[0]
            copy.assign(copy + 1e-6)

    callbacks = [keras.callbacks.LambdaCallback(on_train_batch_end=change)]
    with mock.patch.object(compared_state, "_STEPS", 3):
        try:
            fit(model, *rows(24), batch_size=2, callbacks=callbacks)
        except tfdist.errors.ReplicaMismatchError as error:
            return str(error), len(done)
    return "", len(done)


# Numbers of rows that workers have: of arrays, and of what a generator yields.
def unlike_rows(strategy, form, eager, counts):
    """The error where one worker's data has fewer rows than the other's."""
    x, y = (part[: counts[strategy.extended.worker_rank]] for part in rows(48))
    model = compile_mlp(strategy, run_eagerly=eager)

    def generate():
        for start in range(0, len(x), 8):
            yield x[start : start + 8], y[start : start + 8]

    try:
        if form == "predict":
            model.predict(((batch,) for batch, _ in generate()), verbose=0)
        elif form == "evaluate":
            model.evaluate(generate(), verbose=0)
        elif form == "generator":
            fit(model, generate(), epochs=1)
        else:
            fit(model, x, y, batch_size=8, shuffle=False)
    except tfdist.errors.ProgramMismatchError as error:
        return str(error)
    return ""


def unlike_batches(strategy, call, before, counts, settings):
    """The error where workers pass batches of other sizes to a call, and what equal ones give.

    Args:
        strategy: the strategy.
        call: "train_on_batch" or the like.
        before: the sizes of batches that all workers pass before.
        counts: how many rows each worker passes.
        settings: of `compile`.
    """
    x, y = rows(max(counts))
    model = compile_mlp(strategy, **settings)

    def run(count):
        data = (x[:count],) if call == "predict_on_batch" else (x[:count], y[:count])
        return getattr(model, call)(*data)

    for count in before:
        run(count)
    weights = model.get_weights()
    said = ""
    try:
        run(counts[strategy.extended.worker_rank])
    except tfdist.errors.ProgramMismatchError as error:
        said = str(error)
    kept = all(map(np.array_equal, weights, model.get_weights()))
    return said, kept, np.asarray(run(counts[0])), model.get_weights()


class Programmed(keras.Model):
    """A model whose step does something else on one worker."""

    def __init__(self, kind, is_odd):
        super().__init__()
        self.net, self.kind, self.is_odd = mlp(), kind, is_odd

    def call(self, x):
        return self.net(x)

    def train_step(self, data):
        x, _ = data
        logs = super().train_step(data)
        parts = {"a": x, "b": 2 * x}
        order, factor = "ab", 3.0
        if self.is_odd and self.kind == "order":
            order = "ba"
        if self.is_odd and self.kind == "constant":
            factor = 4.0
        if self.is_odd and self.kind == "print":
            tf.print(logs["loss"], self.optimizer.iterations, output_stream="file:///dev/null")
        norms = {name: tf.sqrt(tf.reduce_sum(parts[name] ** 2)) for name in order}
        if self.is_odd and self.kind == "more":
            norms["a"] = tf.abs(norms["a"])
        return {**logs, "difference": norms["a"] - factor * norms["b"]}


def other_program(strategy, kind, odd):
    """Trains, and predicts; a worker's step, loss, optimizer or prediction is another one."""
    is_odd = strategy is not None and strategy.extended.worker_rank == odd
    with scope(strategy):
        model = Programmed(kind, is_odd)
        power = 3 if is_odd and kind == "loss" else 2
        optimizer = keras.optimizers.SGD(0.1, clipnorm=1.0 if is_odd and kind == "clipnorm" else 9)
        model.compile(optimizer, lambda y, p: tf.reduce_mean(tf.abs(p) ** power))
    x, y = rows(24)
    history = fit(model, x, y, batch_size=8)
    if is_odd and kind == "predict":
        model.call = lambda x: tf.tanh(model.net(x))
    return outcome(model, history, predicted=model.predict(x, verbose=0))


def refused_program(strategy, kind, odd):
    try:
        other_program(strategy, kind, odd)
    except tfdist.errors.ProgramMismatchError as error:
        return str(error)
    return ""


def crossed_in_a_loop(strategy, kind, odd):
    """What a custom loop ends with if one worker adds up two losses in another order.

    Args:
        strategy: the workers'.
        kind: how the workers differ; "crossed" alone is a mistake.
        odd: the rank of the worker that does otherwise.
    """
    rank = strategy.extended.worker_rank
    with scope(strategy):
        weights = [tf.Variable([1.0, 2.0], name=name) for name in ("first", "second")]

    @tf.function
    def loop(x):
        def step(x):
            context = tf.distribute.get_replica_context()
            losses = [tf.reduce_mean(x * weights[0]), tf.reduce_max(x * weights[1])]
            if kind == "crossed" and rank == odd:
                losses.reverse()
            elif kind == "zeros":
                losses = [one if i == rank else tf.zeros([]) for i, one in enumerate(losses)]
            elif kind == "others" and rank == odd:
                losses = [tf.exp(losses[0]), losses[1]]
            elif kind == "print" and rank == odd:
                tf.print(losses)
            return [context.all_reduce("SUM", one) for one in losses]

        return strategy.run(step, args=(x,))

    try:
        for number in itertools.count():
            loop(tf.constant([3.0, 5.0]))
            time.sleep(0.05)  # Rank 0 compares in another thread.
            if kind != "crossed" and number == 20:
                break
    except tf.errors.OpError as error:
        return error.message
    return ""
