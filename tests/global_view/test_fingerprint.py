"""Fingerprints differ if, and only if, programs compute different values."""

import itertools

import numpy as np
import tensorflow as tf

from tfdist._src.global_view.explain import Fingerprints, StepFingerprints, effects


def traced(program, rows=None):
    function = tf.function(program, autograph=False)
    return function.get_concrete_function(tf.TensorSpec([rows, 3])).graph


def of_results(program, rows=None):
    graph = traced(program, rows)
    found = Fingerprints(graph)
    return [found.of(t) for t in graph.outputs]


def named(x):
    with tf.name_scope("elsewhere"):
        return tf.tanh(x, name="another") @ tf.ones([3, 2])


def printing(x):
    tf.print(x)
    return tf.tanh(x) @ tf.ones([3, 2])


def by_condition(value):
    return lambda x: tf.cond(tf.reduce_sum(x) > 0, lambda: x * value, lambda: x)


def in_loop(value):
    return lambda x: tf.while_loop(lambda i, x: i < 3, lambda i, x: (i + 1, x + value), (0, x))[1]


# Programs that compute the same values, and programs that all compute different ones.
SAME = [lambda x: tf.tanh(x) @ tf.ones([3, 2]), named, printing]
OTHERS = {
    "operation": lambda x: tf.sin(x),
    "operands": lambda x: x - tf.tanh(x),
    "crosswise": lambda x: tf.tanh(x) - x,
    "attribute": lambda x: tf.matmul(x, x, transpose_a=True),
    "other attribute": lambda x: tf.matmul(x, x, transpose_b=True),
    "type": lambda x: tf.cast(x, tf.float64),
    "other type": lambda x: tf.cast(x, tf.float16),
    "constant": lambda x: x * 2.0,
    "other constant": lambda x: x * 3.0,
    "integers": lambda x: tf.gather(x, [0, 2], axis=1),
    "other integers": lambda x: tf.gather(x, [0, 1], axis=1),
    "first result": lambda x: tf.math.top_k(x, 2)[0],
    "branch": by_condition(2.0),
    "other branch": by_condition(3.0),
    "loop": in_loop(2.0),
    "other loop": in_loop(3.0),
    "function": lambda x: tf.function(tf.sin, autograph=False)(x),
    "other function": lambda x: tf.function(tf.cos, autograph=False)(x),
}


def test_names_prints_and_rows_do_not_count():
    found = {str(of_results(program, rows)) for program in SAME for rows in (None, 4, 6)}
    assert len(found) == 1


def test_what_is_computed_counts():
    found = {name: of_results(program) for name, program in OTHERS.items()}
    for one, other in itertools.combinations(found, 2):
        assert found[one] != found[other], (one, other)
    assert found == {name: of_results(program) for name, program in OTHERS.items()}


def test_roundings_of_many_constants_do_not_count():
    table = np.linspace(0, 1, 3, dtype="float32")
    one, other = (of_results(lambda x, t=t: x * t) for t in (table, np.nextafter(table, 1)))
    assert one == other
    assert of_results(lambda x: x * table) != of_results(lambda x: x @ np.eye(3, dtype="float32"))


def test_the_order_of_effects_and_which_variables_have_them_counts():
    a, b, unused = tf.Variable(1.0), tf.Variable(1.0), tf.Variable(1.0)

    def program(first, second):
        def run(x):
            first.assign_add(tf.reduce_sum(x))
            second.assign_add(1.0)
            return x

        graph = traced(run)
        order = {id(v.handle): i for i, v in enumerate((unused, a, b))}
        captured = {inner.op.name: f"variable {order[id(o)]}" for o, inner in graph.captures}
        assert len(effects(graph)) == 2
        return StepFingerprints([], graph, graph.outputs, captured, updates=True).values

    assert program(a, b) == program(a, b)
    assert program(a, b) != program(b, a)
