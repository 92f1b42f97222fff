"""Variables without values are made by the threads that ask for them, and by no others."""

from __future__ import annotations

import contextlib
from concurrent.futures import ThreadPoolExecutor

import keras
import numpy as np
import pytest

from tfdist._src.internals.keras import Trainer, Variable
from tfdist._src.internals.variables import deferred_variables, has_value


@pytest.fixture
def pool():
    with ThreadPoolExecutor(1) as pool:
        yield pool


def make_model():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model


def methods():
    return vars(Trainer)["compile_from_config"], vars(Variable).get("__init__")


def test_another_thread_loads_a_compiled_model(pool):
    config = keras.saving.serialize_keras_object(make_model())
    load = keras.saving.deserialize_keras_object
    with deferred_variables() as waiting:
        loaded = pool.submit(load, config).result()
        variable = pool.submit(keras.Variable, np.ones(3, "float32")).result()
        assert hasattr(loaded, "optimizer")
        assert not waiting
        assert has_value(variable)
        assert all(map(has_value, loaded.variables))
        assert not hasattr(load(config), "optimizer")
        assert waiting
        assert not any(map(has_value, waiting))


def test_scopes_of_two_threads_may_overlap(pool):
    before = methods()
    first, second = deferred_variables(), contextlib.ExitStack()
    with first:
        made = pool.submit(second.enter_context, deferred_variables()).result()
    assert has_value(keras.Variable(np.ones(3, "float32")))
    variable = pool.submit(keras.Variable, np.ones(3, "float32")).result()
    assert made == [variable]
    assert not has_value(variable)
    pool.submit(second.close).result()
    assert methods() == before
