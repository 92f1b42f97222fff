"""Updates of variables: whole variables stay equal on all workers, and parts add up."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from tests.global_view.simulation import check, gathers
from tests.harness.tiers import some
from tfdist.errors import UnsupportedError

SHARES = [[6, 5], [4, 4, 3], [11, 0]]
_RANDOM = np.random.default_rng(0)
X = _RANDOM.normal(size=(11, 4)).astype("float32")
TIMES = _RANDOM.normal(size=(11, 3, 4)).astype("float32")


class State:
    """Variables of several shapes and types."""

    def __init__(self):
        self.number = tf.Variable(5.0)
        self.count = tf.Variable(7, dtype=tf.int64)
        self.vector = tf.Variable(np.full(4, -3.0, "float32"))
        self.table = tf.Variable(np.ones((5, 4), "float32"))

    @property
    def all(self):
        return [self.number, self.count, self.vector, self.table]


def _places(x):
    return tf.range(tf.shape(x)[0]) % 5


def assign(state, x):
    state.vector.assign(state.vector * 0.9 + tf.reduce_mean(x, 0) * 0.1)
    state.number.assign_add(tf.reduce_max(x))
    state.number.assign_sub(tf.reduce_sum(x) * 0.1)
    state.count.assign_add(tf.cast(tf.shape(x)[0], tf.int64))
    return [state.vector + 0.0, x * state.number, state.count + 0]


def scatter(state, x):
    state.table.scatter_add(tf.IndexedSlices(x, _places(x)))
    state.table.scatter_nd_add([[1], [2]], x[:2])
    state.table.scatter_update(tf.IndexedSlices(x[3:4], [4]))
    return [state.table + 0.0]


def scatter_largest(state, x):
    state.table.scatter_max(tf.IndexedSlices(x, _places(x)))
    return [state.table + 0.0]


def add(state, x):
    state.number.assign_add(tf.reduce_sum(x))
    state.count.assign_add(tf.cast(tf.shape(x)[0], tf.int64))
    state.table.assign_add(tf.math.unsorted_segment_sum(x, _places(x), 5))
    return [state.number / tf.cast(state.count, tf.float32)]


def largest(state, x):
    state.vector.assign(tf.maximum(state.vector, tf.reduce_max(x, 0)))
    state.number.assign(state.number * 0.5 + tf.reduce_mean(x))
    state.count.assign(tf.maximum(state.count, tf.cast(tf.shape(x)[0], tf.int64) * 2))
    return [state.vector + 0.0]


def window(state, x):
    total = tf.reduce_sum(x, 0, keepdims=True)
    state.table.assign(tf.concat([state.table[1:], total], 0))
    state.count.assign_sub(2)
    return []


def use(state, x):
    weights = x * state.number / tf.cast(state.count, tf.float32)
    return [weights, tf.reduce_sum(x * state.vector), tf.gather(state.table, _places(x)) * x]


def scatter_parts(state, x):
    state.table.scatter_add(tf.IndexedSlices(x * 2.0, _places(x)))
    state.table.scatter_update(tf.IndexedSlices(x[:1], [4]))
    state.table.scatter_nd_update([[1]], tf.reduce_sum(x, 0, keepdims=True))
    state.table.scatter_sub(tf.IndexedSlices(tf.reduce_sum(x, 0, keepdims=True), [1]))
    state.table.scatter_mul(tf.IndexedSlices(tf.reduce_max(x, 0, keepdims=True), [0]))
    return []


def scatter_extremes(state, x):
    state.table.scatter_max(tf.IndexedSlices(x, _places(x)))
    state.table.scatter_min(tf.IndexedSlices(x * 2.0, _places(x)))
    first = state.table.gather_nd([[0, 1], [4, 2]])
    state.table[1:3].assign(x[:2])
    return [first, state.table.gather_nd(_places(x)[:, tf.newaxis])]


def conditional(state, x):
    tf.cond(
        tf.reduce_sum(x) > 0.0,
        lambda: state.number.assign_add(tf.reduce_sum(x)),
        lambda: state.number.assign(0.0),
    )
    return []


def repeated(state, x):
    def step(i):
        state.number.assign_add(tf.reduce_sum(x) * 0.1)
        return (i + 1,)

    tf.while_loop(lambda i: i < 3, step, [0])
    return [state.number + 0.0]


def called(state, x):
    function = tf.function(lambda x: state.number.assign_add(tf.reduce_sum(x)), autograph=False)
    function(x)
    before = state.number + 0.0
    function(x)
    return [before, state.number + 0.0]


def ordered(state, x):
    first = state.number.read_value()
    state.number.assign(tf.reduce_sum(x))
    second = state.number.read_value()
    state.number.assign(2.0)
    return [first, second]


# For each program, the types of the operations that gather rows because they update a whole
# variable by rows.
WHOLE = {
    assign: (),
    scatter: ("ResourceScatterAdd", "StridedSlice"),
    scatter_largest: ("ResourceScatterMax",),
    scatter_extremes: ("ResourceScatterMax", "ResourceScatterMin", "StridedSlice"),
    conditional: (),
    repeated: (),
    called: (),
    ordered: (),
}
PARTS = [
    add,
    largest,
    window,
    use,
    scatter_parts,
    scatter_extremes,
    conditional,
    repeated,
    called,
    ordered,
]


@pytest.mark.parametrize("static", some([False, True], always=[False]))
@pytest.mark.parametrize("shares", some(SHARES, always=[[4, 4, 3]]))
@pytest.mark.parametrize("program", WHOLE)
def test_whole_variables_are_equal_on_all_workers(program, shares, static):
    state = State()
    _, analysis = check(lambda x: program(state, x), [X], shares, static=static, steps=2)
    assert set(gathers(analysis)) <= set(WHOLE[program])


@pytest.mark.parametrize("static", some([False, True], always=[False]))
@pytest.mark.parametrize("shares", some([*SHARES, [4, 7, 0]], always=[[4, 7, 0]]))
@pytest.mark.parametrize("program", PARTS)
def test_variables_in_parts_add_up(program, shares, static):
    state = State()
    _, analysis = check(
        lambda x: program(state, x), [X], shares, static=static, partial=state.all, steps=3
    )
    coupled = WHOLE[program] if program is scatter_extremes else ()
    assert set(gathers(analysis)) <= set(coupled)


def test_updates_that_parts_cannot_make_are_refused():
    state = State()

    def program(x):
        tf.raw_ops.ResourceApplyGradientDescent(
            var=state.vector.handle, alpha=0.1, delta=tf.reduce_sum(x, 0)
        )
        return []

    with pytest.raises(UnsupportedError, match="ResourceApplyGradientDescent"):
        check(program, [X], [6, 5], partial=state.all)


# For each metric, its arguments.
METRICS = {
    "Mean": ({}, lambda x: [x]),
    "BinaryAccuracy": ({}, lambda x: [x[:, :1] > 0, tf.sigmoid(x[:, 1:2])]),
    "AUC": ({"num_thresholds": 20}, lambda x: [x[:, 0] > 0, tf.sigmoid(x[:, 1])]),
    "MeanIoU": ({"num_classes": 3}, lambda x: [tf.argmax(x[:, :3], 1), tf.argmax(x[:, 1:], 1)]),
    "R2Score": ({}, lambda x: [x[:, :2], x[:, 2:]]),
    "F1Score": ({}, lambda x: [tf.one_hot(tf.argmax(x, 1), 4), x]),
    "RootMeanSquaredError": ({}, lambda x: [x[:, :2], x[:, 2:]]),
}


@pytest.mark.parametrize("shares", some(SHARES, always=[[11, 0]]))
@pytest.mark.parametrize("name", some(METRICS, always=["AUC", "MeanIoU"]))
def test_metrics_in_parts(name, shares):
    options, arguments = METRICS[name]
    metric = getattr(keras.metrics, name)(**options)
    metric.update_state(*arguments(tf.constant(X)))

    def program(x):
        metric.update_state(*arguments(x))
        return []

    held = [variable.value for variable in metric.variables]
    sent, _ = check(program, [X], shares, partial=held, steps=2)
    assert set(sent.values()) == {0}


# For each layer with state: its operand, and the types of the operations that gather rows. They
# combine the rows with a state for each row of a batch, which is a whole variable.
LAYERS = {
    "lstm": (lambda: layers.LSTM(4, stateful=True), TIMES, ("AddV2", "AssignVariableOp")),
    "gru": (
        lambda: layers.GRU(4, stateful=True, return_sequences=True),
        TIMES,
        ("AddV2", "AssignVariableOp"),
    ),
    "normalization": (layers.BatchNormalization, X, ()),
    "dropout": (lambda: layers.Dropout(0.5, seed=3), X, ()),
    "spectral": (lambda: layers.SpectralNormalization(layers.Dense(3)), X, ()),
}


@pytest.mark.parametrize("static", some([False, True], always=[False]))
@pytest.mark.parametrize("shares", some(SHARES, always=[[6, 5]]))
@pytest.mark.parametrize("name", some(LAYERS, always=["lstm", "normalization", "dropout"]))
def test_layers_with_state(name, shares, static):
    make, operand, coupled = LAYERS[name]
    keras.utils.set_random_seed(1)
    layer = make()
    layer(operand)
    _, analysis = check(
        lambda x: [layer(x, training=True)], [operand], shares, static=static, steps=2
    )
    assert set(gathers(analysis)) <= set(coupled)
