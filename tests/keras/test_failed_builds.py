"""A model that cannot be built without data is built by its step, and says why if that fails."""

from __future__ import annotations

import traceback
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist

pytestmark = pytest.mark.filterwarnings("ignore:.build\\(\\). was called")

X, Y = np.ones((6, 4), "float32"), np.ones((6, 3), "float32")


@pytest.fixture(scope="module")
def strategy():
    return tfdist.MirroredStrategy(["CPU:0"])


class OnlyByName(keras.Model):
    """Its call takes what only its steps make of a batch."""

    def __init__(self):
        super().__init__()
        self.hidden = keras.layers.Dense(3)
        self.nested = Nested()

    def call(self, inputs):
        return self.nested(self.hidden(inputs["x"])) * inputs["scale"]

    def train_step(self, data):
        x, y = data[:2]
        return super().train_step(({"x": x, "scale": tf.ones_like(x[:, :1])}, y))


class Nested(keras.Model):
    def __init__(self):
        super().__init__()
        self.out = keras.layers.Dense(3)

    def call(self, x):
        return self.out(x)


class FailsTwice(keras.Model):
    """A call that fails in a step otherwise than before it."""

    def __init__(self):
        super().__init__()
        self.hidden = keras.layers.Dense(3)

    def call(self, x):
        if tf.distribute.in_cross_replica_context():
            raise LookupError("the cause")
        raise AttributeError("half made")


def compiled(strategy, cls, **settings):
    with strategy.scope():
        model = cls()
        model.compile("sgd", "mse", **settings)
    return model


CALLS = {
    "fit": lambda model: model.fit(X, Y, batch_size=3, verbose=0),
    "evaluate": lambda model: model.evaluate(X, Y, batch_size=3, verbose=0),
    "train_on_batch": lambda model: model.train_on_batch(X, Y),
    "test_on_batch": lambda model: model.test_on_batch(X, Y),
}


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("call", CALLS)
def test_an_error_names_the_failed_build_as_its_cause(strategy, call, eager):
    model = compiled(strategy, FailsTwice, run_eagerly=eager)
    with pytest.raises(AttributeError, match="half made") as raised:
        CALLS[call](model)
    assert "the cause" in str(raised.value.__cause__)
    assert "LookupError" in "".join(traceback.format_exception(raised.value))


def test_a_check_names_the_failed_build_as_its_cause(strategy, monkeypatch):
    monkeypatch.setattr(
        "tfdist._src.keras.fit.call_checks.check_variables", lambda model: model.not_there
    )
    model = compiled(strategy, FailsTwice)
    with pytest.raises(AttributeError, match="not_there") as raised:
        CALLS["fit"](model)
    assert "the cause" in str(raised.value.__cause__)


def test_a_later_error_has_another_cause(strategy):
    class Fails(OnlyByName):
        batches = 0

        def train_step(self, data):
            if data[0].shape[0] != 6:
                raise ZeroDivisionError
            return super().train_step(data)

    model = compiled(strategy, Fails)
    model.train_on_batch(X, Y)
    with pytest.raises(ZeroDivisionError) as raised:
        model.train_on_batch(X[:2], Y[:2])
    assert raised.value.__cause__ is None


def test_a_failed_build_leaves_the_model_unbuilt(strategy):
    model = compiled(strategy, OnlyByName)
    built = []

    class See(keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            built.append([layer.built for layer in self.model._flatten_layers()])

    model.fit(X, Y, batch_size=3, verbose=0, callbacks=[See()])
    assert built == [[False] * 4]
    assert all(layer.built for layer in model._flatten_layers())
    assert len(model.weights) == 4


@pytest.mark.parametrize("builds", [True, False])
@pytest.mark.parametrize("action", ["default", "error"])
def test_warnings_are_shown_once(strategy, builds, action):
    class Warns(Nested):
        def call(self, x):
            if not (builds or isinstance(x, tf.Tensor)):
                raise LookupError
            return super().call(x)

        def build(self, shape):
            warnings.warn("is built", UserWarning, stacklevel=1)
            self.out.build(shape)

    model = compiled(strategy, Warns)
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter(action)
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        if action == "error":
            with pytest.raises(UserWarning, match="is built"):
                CALLS["train_on_batch"](model)
        else:
            CALLS["train_on_batch"](model)
            assert [str(w.message) for w in shown].count("is built") == 1
