"""Steps of one process that fail, and are taken back and redone."""

from __future__ import annotations

import tensorflow as tf

from tfdist._src.comm import tokens
from tfdist._src.strategy.commit_point import Progress


def redone(_):
    """A step that fails behind what it prepares.

    Returns:
        The values of two variables after each of: the step, its repetition in `progress`, and
        another step, which forgets it.
    """
    one, two = tf.Variable([1.0, 2.0]), tf.Variable([3.0])
    resources = [one.handle, two.handle]

    @tf.function
    def step(x):
        with tf.control_dependencies([tokens.begins(complete=True)]):
            kept = tokens.keep(resources)
        with tf.control_dependencies(kept):
            one.assign_add([x, x])
            two.assign([10.0 * x])
        with tf.control_dependencies(tokens.prepares(resources)):
            fails = tf.debugging.Assert(x < 100.0, [x])
        with tf.control_dependencies([fails]):
            last = two.assign_add([x])
        with tf.control_dependencies([last]):
            tokens.commits()

    def values():
        return [variable.numpy().tolist() for variable in (one, two)]

    progress, states = Progress(), []
    progress.redoable = True
    step(tf.constant(1.0))
    for again in (True, False):
        try:
            with progress.undoing():
                step(tf.constant(100.0))
        except tf.errors.InvalidArgumentError:
            states.append(values())
        if again:
            assert progress.has_undone
            progress.redo()
            states.append(values())
            progress.restore(7)
    with progress.undoing():
        step(tf.constant(1.0))
    tokens.redo()
    states.append(values())
    return states, progress.has_undone
