"""Loops, conditionals, functions and lists of tensors act on rows as on the whole batch."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

from tests.global_view.simulation import check, gathers
from tests.harness.tiers import exhaustive, some

SHARES = [[6, 5], [4, 4, 3], [11, 0]]

_RANDOM = np.random.default_rng(0)


def _normal(*shape):
    return _RANDOM.normal(size=(11, *shape)).astype("float32")


X, TIMES, IMAGES = _normal(4), _normal(5, 4), _normal(3, 4, 4, 2)
IDS = _RANDOM.integers(0, 7, size=(11, 5)).astype("int32")
MASKED = TIMES.copy()
MASKED[2, 3:] = MASKED[5, 2:] = MASKED[9] = 0
W = _RANDOM.normal(size=(4, 4)).astype("float32") / 2


def with_gradients(function, weights=()):
    """Returns a program that computes a function's result, a loss of it, and the gradients."""

    def program(*inputs):
        watched = [x for x in inputs if x.dtype.is_floating]
        with tf.GradientTape() as tape:
            tape.watch(watched)
            result = function(*inputs)
            loss = tf.reduce_mean(tf.sin(result) ** 2)
        sources = [*watched, *(getattr(w, "_value", w) for w in weights)]
        found = tape.gradient(loss, sources, unconnected_gradients="zero")
        return [result, loss, *map(tf.convert_to_tensor, found)]

    return program


# Recurrent layers: a function that makes each, and the shape of its operand.
RECURRENT = {
    "simple": (lambda: layers.SimpleRNN(4), TIMES),
    "lstm": (lambda: layers.LSTM(4), TIMES),
    "gru": (lambda: layers.GRU(4), TIMES),
    "gru before": (lambda: layers.GRU(4, reset_after=False), TIMES),
    "sequences": (lambda: layers.LSTM(4, return_sequences=True), TIMES),
    "backwards": (lambda: layers.LSTM(4, return_sequences=True, go_backwards=True), TIMES),
    "unrolled": (lambda: layers.GRU(4, return_sequences=True, unroll=True), TIMES),
    "bidirectional": (
        lambda: layers.Bidirectional(layers.GRU(4, return_sequences=True)),
        TIMES,
    ),
    "summed": (lambda: layers.Bidirectional(layers.SimpleRNN(4), merge_mode="sum"), TIMES),
    "stacked": (
        lambda: layers.RNN([layers.LSTMCell(4), layers.GRUCell(3)], return_sequences=True),
        TIMES,
    ),
    "masked": (
        lambda: keras.Sequential([layers.Masking(), layers.LSTM(4, return_sequences=True)]),
        MASKED,
    ),
    "masked last": (lambda: keras.Sequential([layers.Masking(), layers.GRU(4)]), MASKED),
    "masked unrolled": (
        lambda: keras.Sequential([layers.Masking(), layers.SimpleRNN(4, unroll=True)]),
        MASKED,
    ),
    "masked zeros": (
        lambda: keras.Sequential(
            [
                layers.Masking(),
                layers.RNN(
                    layers.SimpleRNNCell(4), return_sequences=True, zero_output_for_mask=True
                ),
            ]
        ),
        MASKED,
    ),
    "embedded": (
        lambda: keras.Sequential(
            [
                layers.Embedding(7, 3, mask_zero=True),
                layers.LSTM(4, return_sequences=True),
                layers.GRU(3),
            ]
        ),
        IDS,
    ),
    "embedded both ways": (
        lambda: keras.Sequential(
            [layers.Embedding(7, 3, mask_zero=True), layers.Bidirectional(layers.LSTM(4))]
        ),
        IDS,
    ),
    "distributed": (lambda: layers.TimeDistributed(layers.Dense(2)), TIMES),
    "images": (
        lambda: layers.ConvLSTM2D(2, 3, padding="same", return_sequences=True),
        IMAGES,
    ),
    "lines": (lambda: layers.ConvLSTM1D(2, 3), IMAGES[:, :, 0]),
}


@exhaustive
@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("shares", SHARES)
@pytest.mark.parametrize("name", RECURRENT)
def test_recurrent_layers_gather_nothing(name, shares, static):
    make, operand = RECURRENT[name]
    keras.utils.set_random_seed(1)
    layer = make()
    layer(operand[:1])
    program = with_gradients(lambda x: layer(x, training=True), layer.trainable_variables)
    _, analysis = check(program, [operand], shares, static=static)
    assert gathers(analysis) == []


def _loop(times, step, first):
    return tf.while_loop(lambda i, x: i < times, lambda i, x: (i + 1, step(x)), [0, first])[1]


def _accumulate(add, first):
    def step(i, x, total):
        return i + 1, tf.tanh(x @ W), add(total, x)

    return lambda x: tf.while_loop(lambda i, x, total: i < 3, step, [0, x, first])[2]


def _nested(x):
    return _loop(2, lambda h: _loop(2, lambda g: tf.tanh(g @ W), h) + x, x)


def _nested_growing(x):
    def step(i, h, states):
        h = tf.while_loop(lambda j, h: j <= i, lambda j, h: (j + 1, tf.tanh(h @ W)), [0, h])[1]
        return i + 1, h, states.write(i, h)

    states = tf.TensorArray(tf.float32, 0, dynamic_size=True)
    return tf.while_loop(lambda i, *_: i < 3, step, [0, x, states])[2].stack()


def _growing(axis, shape):
    def run(x):
        return tf.while_loop(
            lambda i, h: i < 2,
            lambda i, h: (i + 1, tf.concat([h, tf.tanh(x @ W)], axis)),
            [0, x],
            shape_invariants=[tf.TensorShape([]), tf.TensorShape(shape)],
        )[1]

    return run


def _transposing(x):
    return tf.while_loop(
        lambda i, h: i < 2,
        lambda i, h: (i + 1, tf.transpose(h)),
        [0, x],
        shape_invariants=[tf.TensorShape([]), tf.TensorShape([None, None])],
    )[1]


def _until_small(x):
    return tf.while_loop(lambda h: tf.reduce_sum(tf.abs(h)) > 9.0, lambda h: (h * 0.5,), [x])[0]


def _scan_over_time(x):
    zeros = tf.zeros([tf.shape(x)[0], 4])
    times = tf.transpose(x, [1, 0, 2])
    return ops.scan(lambda c, e: (tf.tanh(c @ W + e), c * 2.0), zeros, times)[1]


def _both(make):
    """Runs two branches by a condition that holds, and by one that does not."""

    def run(x):
        yes, no = make(x)
        return tf.cond(tf.reduce_sum(x) > -1e9, yes, no) * tf.cond(tf.reduce_sum(x) < -1e9, yes, no)

    return run


def _switch(x):
    branches = [lambda: x @ W, lambda: tf.zeros_like(x) + 1.0, lambda: x * 3.0]
    zero = tf.cast(tf.reduce_sum(x) * 0, tf.int32)
    return tf.add_n([tf.switch_case(zero + k, branches) for k in range(3)])


def _conditionals_in_loop(x):
    def step(i, h):
        even = tf.equal(i % 2, 0)
        return i + 1, tf.cond(even, lambda: tf.tanh(h @ W), lambda: h - tf.reduce_mean(h, 0))

    return tf.while_loop(lambda i, h: i < 4, step, [0, x])[1]


_layer = tf.function(lambda h: tf.tanh(h @ W), autograph=False)
_several = tf.function(lambda h: (tf.reshape(h, [-1]), tf.reduce_sum(h, 0)), autograph=False)
_flat = tf.function(lambda h: tf.reshape(h, [-1, 4]) @ W, autograph=False)


def _functions(x):
    flat, total = _several(x)
    return _layer(_layer(x)) * total + tf.reshape(flat, tf.shape(x))


@tf.custom_gradient
def _scaled(x):
    result = tf.tanh(x)
    return result, lambda gradient: gradient * 2.0 * tf.reduce_mean(result)


def _penalty(x):
    mixing = tf.random.stateless_uniform([tf.shape(x)[0], 1], [1, 2])
    mixed = mixing * x + (1 - mixing) * tf.tanh(x)
    with tf.GradientTape() as tape:
        tape.watch(mixed)
        score = tf.tanh(mixed @ W) @ W
    gradient = tape.gradient(score, mixed)
    return tf.reduce_mean((tf.norm(gradient, axis=1) - 1) ** 2) + tf.reduce_mean(score)


def _second_order(x):
    with tf.GradientTape() as tape:
        tape.watch(x)
        result = _loop(2, lambda h: tf.tanh(h @ W), x)
    return tape.gradient(result, x)


def _written(*elements):
    array = tf.TensorArray(tf.float32, len(elements), element_shape=[None, 4], infer_shape=False)
    for i, element in enumerate(elements):
        array = array.write(i, element)
    return array


def _listed(shape, *elements):
    array = tf.TensorArray(tf.float32, len(elements), element_shape=shape, infer_shape=False)
    return array.scatter(range(len(elements)), tf.stack(elements))


def _split(axis):
    def run(x):
        array = tf.TensorArray(tf.float32, 2, element_shape=[None, None], infer_shape=False)
        if axis:
            array = array.split(tf.transpose(x), [1, 3])
            return tf.reduce_sum(array.read(0), 0) * tf.reduce_sum(array.read(1), 0)
        array = array.split(tf.concat([x, x @ W], 0), [tf.shape(x)[0]] * 2)
        return array.read(0) * array.read(1)

    return run


def _concat_times(x):
    array = tf.TensorArray(tf.float32, 2, element_shape=[None, None], infer_shape=False)
    first = tf.transpose(x)
    return tf.transpose(array.write(0, first).write(1, tf.tanh(first[:1])).concat())


def _rows_and_sums(x):
    array = _written(x, x * 2.0, x @ W)
    return array.gather([0, 2]) + tf.reduce_mean(array.read(1), 0) + array.stack()[:2]


def _sums_in_a_list(x):
    array = _written(*(tf.reduce_sum(v, 0, keepdims=True) for v in (x, x * x)))
    return array.gather([0, 1]) + tf.reduce_mean(array.read(1), 0) + array.stack() * x


def _scattered(x):
    array = _listed([None, 4], x, x * 2.0, x @ W).scatter([2, 0], tf.stack([x * x, x * 3.0]))
    return array.read(0) + array.stack()[1] * array.gather([2])[0]


def _read(x):
    array = tf.TensorArray(tf.float32, tf.shape(x)[0], element_shape=[4]).unstack(x)
    return array.read(2) + tf.reduce_mean(array.stack(), 0)


def _asserted(x):
    tf.debugging.assert_less(x, 100.0)
    tf.debugging.assert_greater(tf.reduce_sum(x * x), 0.0)
    tf.debugging.assert_rank(x, 2)
    tf.debugging.assert_equal(tf.shape(x)[0], 11)
    return tf.debugging.check_numerics(x @ W, "x")


# For each: a function of rows, and the types of the operations that gather rows; the comments say
# why they do.
PROGRAMS = {
    "while": (lambda x: _loop(3, lambda h: tf.tanh(h @ W), x), ()),
    "ops.while": (
        lambda x: ops.while_loop(lambda i, h: i < 3, lambda i, h: (i + 1, ops.tanh(h @ W)), [0, x])[
            1
        ],
        (),
    ),
    "fori": (lambda x: ops.fori_loop(0, 3, lambda i, h: tf.tanh(h @ W), x), ()),
    # Each row depends on the one before.
    "scan": (
        lambda x: ops.scan(lambda c, e: (tf.tanh(c + e), c * 2.0), tf.zeros([4]), x)[1],
        ("TensorListFromTensor",),
    ),
    "tf.scan": (lambda x: tf.scan(lambda c, e: tf.tanh(c + e), x), ("TensorListFromTensor",)),
    # One iteration per row.
    "map": (
        lambda x: tf.map_fn(lambda row: tf.tanh(tf.linalg.matvec(W, row)), x),
        ("TensorListFromTensor",),
    ),
    "ops.map": (
        lambda x: ops.map(lambda row: tf.tanh(tf.linalg.matvec(W, row)), x),
        ("TensorListFromTensor",),
    ),
    # It looks up rows by their numbers.
    "vectorized": (
        lambda x: ops.vectorized_map(lambda row: tf.tanh(tf.linalg.matvec(W, row)), x),
        ("GatherV2", "Transpose"),
    ),
    "until": (_until_small, ()),
    "sums": (_accumulate(lambda total, x: total + tf.reduce_sum(x, 0), np.zeros(4, "f")), ()),
    "means": (_accumulate(lambda total, x: total * tf.reduce_mean(x), np.ones(4, "f")), ()),
    "largest": (
        _accumulate(lambda total, x: tf.maximum(total, tf.reduce_max(x, 0)), np.zeros(4, "f")),
        (),
    ),
    "nested": (_nested, ()),
    "nested growing": (_nested_growing, ()),
    "wider": (_growing(1, [None, None]), ()),
    # The layout changes between the iterations.
    "longer": (_growing(0, [None, 4]), ("ConcatV2", "StatelessWhile", "While")),
    "transposing": (_transposing, ("StatelessWhile", "Transpose")),
    "cond": (_both(lambda x: (lambda: tf.tanh(x @ W), lambda: x * 2.0)), ()),
    "ops.cond": (
        lambda x: ops.cond(tf.reduce_any(x > 1.5), lambda: tf.tanh(x @ W), lambda: x * 2.0),
        (),
    ),
    "rows or whole": (
        _both(lambda x: (lambda: x @ W, lambda: tf.ones([tf.shape(x)[0], 4]))),
        ("OptionalFromValue",),
    ),
    # The size of the first axis is unknown after the conditional.
    "rows or one": (_both(lambda x: (lambda: x, lambda: tf.ones([1, 4]))), ("If", "Mul", "Sum")),
    "partial or whole": (
        _both(lambda x: (lambda: tf.reduce_sum(x @ W, 0), lambda: tf.ones([4]) * 3.0)),
        (),
    ),
    # Rows are on another axis.
    "axes": (
        _both(lambda x: (lambda: x, lambda: tf.reshape(tf.transpose(x), tf.shape(x)))),
        ("Reshape",),
    ),
    "switch": (_switch, ()),
    "cond in loop": (_conditionals_in_loop, ()),
    "loop in cond": (
        _both(lambda x: (lambda: _loop(3, lambda h: tf.tanh(h @ W), x), lambda: x)),
        (),
    ),
    "functions": (_functions, ()),
    "custom gradient": (lambda x: _scaled(x @ W), ()),
    "recompute": (lambda x: tf.recompute_grad(lambda h: tf.tanh(h @ W))(x), ()),
    "remat": (lambda x: keras.remat(lambda h: tf.tanh(h @ W))(x), ()),
    "penalty": (_penalty, ()),
    "second order": (_second_order, ()),
    "list": (lambda x: _written(x, x * 2.0, x @ W).stack(), ()),
    # The list holds whole elements.
    "mixed list": (
        lambda x: _written(tf.zeros([11, 4]), x, x * 2.0).stack(),
        ("TensorListSetItem",),
    ),
    "list of rows": (_read, ("TensorListFromTensor",)),
    # In the backward pass, the number of elements is unknown.
    "joined list": (
        lambda x: _written(x, x * 2.0, x @ W).concat(),
        ("Mul", "TensorListSplit", "TensorListSetItem"),
    ),
    "joined list of times": (_concat_times, ()),
    "split": (_split(0), ()),
    "split times": (_split(1), ()),
    "rows and sums": (_rows_and_sums, ()),
    "sums in a list": (_sums_in_a_list, ()),
    "scattered list": (_scattered, ()),
    "asserts": (_asserted, ()),
}
_USUAL = [
    "until",
    "means",
    "cond in loop",
    "remat",
    "rows and sums",
    "asserts",
]


@pytest.mark.parametrize("static", some([False, True], always=[False]))
@pytest.mark.parametrize("shares", some(SHARES, always=[[4, 4, 3]]))
@pytest.mark.parametrize("name", some(PROGRAMS, always=_USUAL))
def test_control_flow_computes_with_own_rows_as_with_all(name, shares, static):
    function, coupled = PROGRAMS[name]
    _, analysis = check(with_gradients(function), [X], shares, static=static)
    assert set(gathers(analysis)) <= set(coupled)


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("shares", some(SHARES, always=[[11, 0]]))
def test_scans_over_time_gather_nothing(shares, static):
    _, analysis = check(with_gradients(_scan_over_time), [TIMES], shares, static=static)
    assert gathers(analysis) == []


@pytest.mark.parametrize("shares", some(SHARES, always=[[6, 5]]))
def test_functions_that_flatten(shares):
    program = with_gradients(lambda x: tf.reshape(_flat(x), tf.shape(x)))
    _, analysis = check(program, [TIMES], shares)
    assert gathers(analysis) == []


@pytest.mark.parametrize("shares", some(SHARES, always=[[4, 4, 3]]))
def test_python_functions_take_whole_operands(shares):
    def program(x):
        ordered = tf.numpy_function(lambda a: np.sort(a, 0), [x @ W], tf.float32)
        total = tf.py_function(lambda a: a * 2.0, [tf.reduce_sum(x, 0)], tf.float32)
        return [ordered, total]

    _, analysis = check(program, [X], shares)
    assert set(gathers(analysis)) == {"PyFunc"}


def test_prints_of_a_program_appear_once(capfd):
    def program(x):
        tf.print("largest:", tf.reduce_max(x) > 100.0)
        return [x + 1.0]

    check(program, [X], (4, 7, 0))
    assert capfd.readouterr().err.count("largest:") == 2  # One is of the unpartitioned program.


def test_an_assertion_fails_if_any_row_violates_it():
    def program(x):
        tf.debugging.assert_less(x, float(X[8].max()))
        return [x + 1.0]

    with pytest.raises(Exception, match=r"assert|Condition|less"):
        check(program, [X], (6, 5))


def test_elements_that_have_not_been_written_are_zeros():
    def program(x):
        array = tf.TensorArray(tf.float32, 2, element_shape=[4])
        array = array.write(1, tf.reduce_sum(x, 0))
        return [array.stack(), array.read(0)]

    check(program, [X], (6, 5))
