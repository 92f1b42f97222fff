"""Places in the user's program, as they stand for names."""

from __future__ import annotations

import re

import keras
import pytest
import tensorflow as tf

from tfdist._src.comm import tokens


def here():
    return tokens.of_call()


def test_the_innermost_line_of_the_users():
    of_call = tokens.of_call
    found = [here(), of_call(), *tf.nest.map_structure(lambda _: of_call(), [1])]
    assert all(re.fullmatch(r"test_call_site\.py:\d+", text) for text in found)
    assert len(set(found)) == 2


def test_lines_that_autograph_has_rewritten():
    lines = []

    @tf.function
    def traced(x):
        for _ in tf.range(2):
            lines.append(here())
        return x

    traced(tf.constant(1))
    assert set(lines) == {here()}


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("/home/me/train.py", "train.py:1"),
        ("<stdin>", "<stdin>:1"),
        # The cell's number, which differs between workers, and a hash of its text.
        ("<ipython-input-7-0a1b2c>", "<ipython-input-0a1b2c>:1"),
        ("/tmp/ipykernel_12/345.py", "345.py:1"),
    ],
)
def test_call_sites_are_named_by_file_and_line(file, name):
    namespace = {"call_site": tokens}
    exec(compile("found = call_site.of_call()", file, "exec"), namespace)
    assert namespace["found"] == name


def test_what_others_call():
    """Keras's own calls of TensorFlow, and TensorFlow's of itself, are no places of the user's."""

    class Asks(tf.Module):
        def reduce(self):
            return tokens.of_tensorflow_call("with_name_scope")

    assert Asks().reduce() == ""
    assert keras.tree.map_structure(lambda _: tokens.of_tensorflow_call("any"), [1]) == [""]
