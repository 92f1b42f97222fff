"""What an error says to other workers: one line, with its cause."""

from __future__ import annotations

import keras
import pytest
import tensorflow as tf

from tfdist._src.group import cause


def raised(function, *arguments):
    with pytest.raises(Exception) as found:
        function(*arguments)
    return found.value


class Broken(keras.layers.Layer):
    def call(self, x):
        raise ValueError("no more ink\nin the pen")


def fail(x):
    raise ValueError("no more ink\nin the pen")


def fail_in_one_line(x):
    raise ValueError("no more ink in the pen")


@tf.function
def fails(x):
    return tf.numpy_function(fail_in_one_line, [x], tf.float32)


@tf.function
def is_not_traced(x):
    fail(x)


@tf.function
def asserts(x):
    tf.debugging.assert_less(x, 0.0, "no more ink")
    return x


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (fail, "ValueError: no more ink"),
        (Broken(), "ValueError: Exception encountered when calling Broken.call(). no more ink"),
        (fails, "InvalidArgumentError: ValueError: no more ink in the pen"),
        (is_not_traced, "ValueError: in the pen"),
        (asserts, "InvalidArgumentError: assertion failed: [no more ink]"),
    ],
)
def test_it_is_one_line(function, said):
    line = cause(raised(function, tf.ones([1])))
    assert line.startswith(said)
    assert len(line.splitlines()) == 1


def test_an_error_without_a_message():
    assert cause(StopAsyncIteration()) == "StopAsyncIteration"
