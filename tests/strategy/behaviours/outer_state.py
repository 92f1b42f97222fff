"""State that was created outside of the strategy's scope, and differs between the workers."""

from __future__ import annotations

import tempfile
from unittest import mock

import keras
import numpy as np
import tensorflow as tf

import tfdist
from tests.strategy.behaviours.common import cross_entropy, fit, mlp, outcome, rows, scope
from tfdist._src.keras.fit import compared_state


class Reading(keras.Model):
    """A model whose steps use state in a way that a function says."""

    def __init__(self, use):
        super().__init__()
        self.net, self.use = mlp(), use

    def call(self, x, training=False):
        return self.net(x)

    def train_step(self, data):
        x, y, *_ = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(y=y, y_pred=self(x))
            loss = loss * self.use(self, loss)
        variables = self.net.trainable_variables
        self.optimizer.apply(tape.gradient(loss, variables), variables)
        return {"loss": loss}

    def test_step(self, data):
        x, y, *_ = data
        loss = self.compute_loss(y=y, y_pred=self(x))
        return {"loss": loss * self.use(self, loss)}

    def predict_step(self, data):
        x, *_ = keras.utils.unpack_x_y_sample_weight(data)
        return self(x) * self.use(self, tf.constant(1.0))


def _in_a_branch(variable):
    return lambda model, loss: tf.cond(loss > -1.0, lambda: variable + 1.0, lambda: 1.0)


def _counted(variable):
    def use(model, loss):
        variable.assign_add(1.0)
        return 1.0 / variable

    return use


def _picks(variable):
    number = tf.Variable(0, name="number")
    return lambda model, loss: 1.0 + tf.gather(model.net.layers[-1].bias, number), number


# How a step uses a variable, and another variable that it uses, if any.
COUNTS = {
    "factor": lambda v: ((lambda model, loss: v), v),
    "branch": lambda v: (_in_a_branch(v), v),
    "written": lambda v: (_counted(v), v),
    "index": _picks,
}


def differs(strategy, how, call):
    """The error where one worker has another value; "" if there is none.

    Args:
        strategy: the strategy.
        how: a key of `COUNTS`, or "generator".
        call: of the model, before which it is assigned.
    """
    if how == "generator":
        state = tf.random.Generator.from_seed(3)
        use, changed = (lambda model, loss: state.uniform([])), state.state
    else:
        use, changed = COUNTS[how](tf.Variable(0.5, name="beta"))
    with scope(strategy):
        model = Reading(use)
        model.compile("sgd", cross_entropy())
    x, y = rows(24)
    calls = {
        "fit": lambda: fit(model, x, y, batch_size=8),
        "evaluate": lambda: model.evaluate(x, y, batch_size=8, verbose=0),
        "predict": lambda: model.predict(x, batch_size=8, verbose=0),
        "train_on_batch": lambda: [model.train_on_batch(x, y) for _ in range(4)],
    }
    if call == "epoch":
        assign = keras.callbacks.LambdaCallback(
            on_epoch_end=lambda epoch, logs: _assign(strategy, changed)
        )
        calls[call] = lambda: fit(model, x, y, batch_size=8, callbacks=[assign])
    else:
        calls[call]()
        _assign(strategy, changed)
    try:
        with mock.patch.object(compared_state, "_STEPS", 2):
            calls[call]()
    except tfdist.errors.ReplicaMismatchError as error:
        return str(error)
    return ""


def _assign(strategy, variable):
    if strategy.extended.worker_rank == 1:
        variable.assign(tf.ones_like(variable) * 2)


def may_differ(strategy):
    """Trains where each worker has other values of state on which no result depends."""
    rank = 0 if strategy is None else strategy.extended.worker_rank
    printed = tf.Variable(float(rank))
    metric = keras.metrics.Mean()
    number = tf.Variable(2 * rank, dtype=tf.int64)
    writer = tf.summary.create_file_writer(tempfile.mkdtemp())
    table = tf.lookup.experimental.MutableHashTable(tf.int64, tf.float32, 1.0)
    numbers = iter(tf.data.Dataset.from_tensors(1.0).repeat())

    def use(model, loss):
        printed.assign_add(1.0)
        tf.print(printed, output_stream="file:///dev/null")
        metric.update_state(loss)
        with writer.as_default(), tf.summary.record_if(tf.equal(number % 2, 0)):
            tf.summary.scalar("loss", loss, step=number)
        number.assign_add(1)
        return table.lookup(tf.constant(3, tf.int64)) * next(numbers)

    with scope(strategy):
        model = Reading(use)
        model.compile("sgd", cross_entropy())
    x, y = rows(24)
    history = [fit(model, x, y, batch_size=8)]
    if rank == 1:
        metric.reset_state()
    history.append(fit(model, x, y, batch_size=8))
    return outcome(model, history, loss=np.asarray(model.evaluate(x, y, verbose=0)))
