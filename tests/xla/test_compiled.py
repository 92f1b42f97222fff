"""Functions whose operations are compiled between those that cannot be."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import tensorflow as tf

from tests.harness.tiers import exhaustive
from tfdist._src.native import load_ops
from tfdist._src.xla import clusters, compiled_between_collectives, program, uncompiled_scope


def heavy(x):
    """Enough to be worth a program."""
    for _ in range(4):
        x = tf.tanh(tf.matmul(x, x)) + x
    return x


def on_the_host(x):
    result = tf.numpy_function(lambda v: v + 1, [x], x.dtype)
    result.set_shape(x.shape)
    return result


def clusters_of(concrete):
    """The operations of each compiled function that a function calls, in the program's order."""
    functions = {f.signature.name: f for f in concrete.graph.as_graph_def().library.function}

    def found(nodes):
        for node in nodes:
            called = [a.func.name for a in node.attr.values() if a.HasField("func")]
            if node.attr["_XlaMustCompile"].b:
                yield [n.op for n in functions[called[0]].node_def]
            else:
                for name in called:
                    yield from found(functions[name].node_def)

    return list(found(concrete.graph.as_graph_def().node))


def outside_clusters(concrete):
    """The nodes of a function that XLA does not compile, those of functions that it calls too."""
    functions = {f.signature.name: f for f in concrete.graph.as_graph_def().library.function}

    def found(nodes):
        for node in nodes:
            called = [a.func.name for a in node.attr.values() if a.HasField("func")]
            if not called:
                yield node
            elif not node.attr["_XlaMustCompile"].b:
                yield node
                for name in called:
                    yield from found(functions[name].node_def)

    return list(found(concrete.graph.as_graph_def().node))


def compare(function, *arguments):
    """Runs a function with and without compilation; returns the clusters."""
    return clusters_of(same_as_plain(function, *arguments))


def same_as_plain(function, *arguments):
    """The same; returns the compiled function."""
    compiled = tf.function(compiled_between_collectives(function), autograph=False)
    expected = tf.function(function, autograph=False)(*arguments)
    for result, wanted in zip(
        tf.nest.flatten(compiled(*arguments)), tf.nest.flatten(expected), strict=True
    ):
        np.testing.assert_allclose(result, wanted, rtol=1e-5, atol=1e-5)
    return compiled.get_concrete_function(*arguments)


X = np.random.default_rng(0).normal(size=(4, 4)).astype("float32") / 4


def test_all_is_one_cluster_where_nothing_stops_it():
    (cluster,) = compare(heavy, tf.constant(X))
    assert cluster.count("MatMul") == 4


def test_what_is_needed_first_comes_first():
    def function(x):
        early = on_the_host(heavy(x))
        late = on_the_host(heavy(heavy(x) + 2))
        return heavy(early + late)

    counts = [cluster.count("MatMul") for cluster in compare(function, tf.constant(X))]
    assert counts == [4, 8, 4]


def test_variables_are_changed_in_place():
    variable = tf.Variable(X)
    start = variable.numpy()

    def function(x):
        read = heavy(variable) + x
        variable.assign_sub(0.1 * read)
        with tf.control_dependencies([on_the_host(tf.reduce_sum(read))]):
            variable.assign_add(heavy(x))
        return variable + 0

    compiled = tf.function(compiled_between_collectives(function), autograph=False)
    result = compiled(tf.constant(X)).numpy()
    after = variable.numpy()
    variable.assign(start)
    expected = tf.function(function, autograph=False)(tf.constant(X))
    np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(after, variable, rtol=1e-5, atol=1e-6)
    assert len(clusters_of(compiled.get_concrete_function(tf.constant(X)))) == 2


def test_reads_see_what_was_written_before():
    scalar = tf.Variable(1.0)

    def function(x):
        scalar.assign(scalar * 0.5)
        return heavy(x) / (1 - scalar)

    compiled = tf.function(compiled_between_collectives(function), autograph=False)
    first = compiled(tf.constant(X)).numpy()
    np.testing.assert_allclose(first, heavy(tf.constant(X)) / 0.5, rtol=1e-5)


def test_branches_that_communicate_are_compiled_as_well():
    ops = load_ops()
    order = tf.raw_ops.VarHandleOp(dtype=tf.float32, shape=[], shared_name="test_branches")

    def function(x, condition):
        half, rows = tf.constant(0.5), tf.cast(tf.shape(x)[0], tf.float32)  # known to the graph

        def then():
            with tf.control_dependencies([ops.tfdist_span_begins(order=order)]):
                return heavy(x) * half * rows

        return tf.cond(condition, then, lambda: x * 2) + 1

    def nested(x, condition):
        return tf.cond(condition, lambda: function(x, condition), lambda: x * 3) + 1

    for taken, each in itertools.product((True, False), (function, nested)):
        clusters = compare(each, tf.constant(X), tf.constant(taken))
        assert [c.count("MatMul") for c in clusters] == [4]


def test_what_is_left_to_tensorflow():
    def function(x):
        with uncompiled_scope():
            x = heavy(x)
        return heavy(x)

    assert [c.count("MatMul") for c in compare(function, tf.constant(X))] == [4]


def test_lists_of_a_loop_stay_outside():
    def function(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            last = tf.while_loop(
                lambda i, v: i < 3, lambda i, v: (i + 1, heavy(v)), (0, x), maximum_iterations=3
            )[1]
        return on_the_host(last), tape.gradient(last, x)

    concrete = same_as_plain(function, tf.constant(X))
    loops = [n for n in outside_clusters(concrete) if n.op in ("While", "StatelessWhile")]
    # TensorFlow makes them parts of the graph, which is faster.
    assert len(loops) == 2 and all(n.attr["_lower_using_switch_merge"].b for n in loops)


def test_sums_over_known_axes_are_compiled_wherever_the_axes_are_computed():
    def function(x, w):
        with tf.GradientTape() as tape:
            tape.watch([x, w])
            y = tf.tanh(tf.matmul(x[None], w))
        to_x, to_w = tape.gradient(y, [x, w])
        return on_the_host(to_x), to_w

    concrete = same_as_plain(function, tf.constant(X), tf.constant(X))
    assert len(clusters_of(concrete)) == 2
    assert not [n.op for n in outside_clusters(concrete) if n.op.startswith(("BatchMatMul", "Sum"))]


def test_a_few_small_numbers_are_not_worth_a_program():
    def function(x, count):
        for _ in range(10):
            count = count * 2 + 1
        return heavy(on_the_host(x * tf.cast(count, tf.float32)))

    assert len(compare(function, tf.constant(X), tf.constant(1))) == 1


def test_an_operation_that_xla_lacks_is_named():
    def function(x):
        with tf.name_scope("my_layer"):
            return tf.math.real(tf.linalg.eig(heavy(x))[0])

    compiled = tf.function(compiled_between_collectives(function), autograph=False)
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"Eig.*my_layer"):
        compiled(tf.constant(X))


def test_random_numbers_do_not_change():
    def noise(x):
        return x + tf.random.stateless_uniform(tf.shape(x), [1, 2])

    assert len(compare(lambda x: heavy(noise(x)), tf.constant(X))) == 1
    # Where functions draw them, these stay TensorFlow's.
    compare(lambda x: heavy(tf.function(noise)(x)), tf.constant(X))
    compare(lambda x: heavy(tf.cond(x[0, 0] < 9, lambda: noise(x), lambda: x)), tf.constant(X))


def test_what_may_have_to_be_equal_does_not_depend_on_own_sizes(monkeypatch):
    # As after a sum: each worker has the same.
    monkeypatch.setattr(clusters, "_COMMUNICATES", ("PyFunc",))
    gradient = np.random.default_rng(1).normal(size=(6, 64)).astype("float32")

    def trained(sizes):
        weights = tf.Variable(np.random.default_rng(0).normal(size=(6, 64)).astype("float32"))
        average = tf.Variable(tf.zeros([6, 64]))
        chosen, picked, scaled = (tf.Variable(tf.zeros([6, 6])) for _ in range(3))

        def step(x):
            loss = tf.reduce_mean(tf.tanh(x @ weights) ** 2)
            summed = tf.numpy_function(lambda _: gradient, [loss], tf.float32)
            weights.assign_sub(0.1 * tf.ensure_shape(summed, [6, 64]))
            active = tf.boolean_mask(weights, tf.abs(weights) > 0.3)  # of no static shape
            norm = tf.sqrt(tf.reduce_sum(active * active))
            average.assign(average * 0.9 + 0.1 * weights / norm)
            # Conditions of a worker's own that are the same on all.
            some = tf.shape(x)[0] > 0
            factor = tf.cast(some, tf.float32)
            products = [heavy(weights @ tf.transpose(weights) / 64 + i) for i in range(4)]
            chosen.assign(tf.where(some, products[0], chosen))
            picked.assign(tf.stack(products)[tf.cast(some, tf.int32)])
            scaled.assign(factor * products[2] + (1 - factor) * scaled)
            return on_the_host(tf.reduce_mean(tf.tanh(x @ weights) ** 2) + norm)

        run = tf.function(
            compiled_between_collectives(step),
            input_signature=[tf.TensorSpec([None, 6], tf.float32)],
            autograph=False,
        )
        for size in sizes:
            run(tf.ones([size, 6]))
        return [v.numpy() for v in (weights, average, chosen, picked, scaled)]

    for here, there in zip(trained([3] * 5), trained([4, 2, 2, 2, 2]), strict=True):
        assert np.array_equal(here, there)


def test_what_only_own_operations_use_is_compiled_with_them(monkeypatch):
    monkeypatch.setattr(clusters, "_COMMUNICATES", ("PyFunc",))
    weights = tf.Variable(np.resize(X, (16, 16)))

    def step(x):
        mask = tf.linalg.band_part(tf.reshape(weights, [64, 4])[:16] @ tf.ones([4, 16]), -1, 0)
        y = x @ (mask * tf.reshape(weights, [16, 16]))
        with tf.control_dependencies([y]):
            scale = tf.constant(0.5)  # as in a gradient
        summed = on_the_host(tf.reduce_sum(heavy(y * scale), 0))
        weights.assign_sub(heavy(weights) * summed)
        return summed

    run = tf.function(compiled_between_collectives(step), autograph=False)
    own, update = clusters_of(run.get_concrete_function(tf.constant(np.resize(X, (16, 16)))))
    assert "MatrixBandPart" in own and own.count("MatMul") == 6
    assert "AssignSubVariableOp" in update and update.count("MatMul") == 4


@exhaustive
def test_other_rows_are_compiled_once_they_come_often(monkeypatch):
    def squares(x, count):
        return heavy(tf.transpose(x) @ x), count + tf.shape(x)[0]

    specs = [tf.TensorSpec([None, 4], tf.float32), tf.TensorSpec([], tf.int32)]
    for device in ("CPU:0", "GPU:0"):
        monkeypatch.setattr(program, "_device_of", lambda _, device=device: device)
        compiled = tf.function(compiled_between_collectives(squares), input_signature=specs)
        concrete = compiled.get_concrete_function()
        assert [c.count("MatMul") for c in clusters_of(concrete)] == [5]
        (choice,) = [n for n in outside_clusters(concrete) if n.op in ("If", "StatelessIf")]
        # On a GPU, integers are in the host's memory; only parts of the graph may take them.
        assert choice.attr["_lower_using_switch_merge"].b == (device == "GPU:0")
        # What is not compiled gives the same.
        for rows in (4, 3, 0, 4):
            x = tf.constant(np.resize(X, (rows, 4)))
            for result, wanted in zip(compiled(x, 1), squares(x, 1), strict=True):
                np.testing.assert_allclose(result, wanted, rtol=1e-5, atol=1e-6)

    order = tf.raw_ops.VarHandleOp(dtype=tf.float32, shape=[], shared_name="test_rows")
    asked = tf.function(
        lambda shape: load_ops().tfdist_shapes_fit(order=order, shapes=[shape]),
        input_signature=[tf.TensorSpec([2], tf.int64)],
    )
    assert not asked([0, 4])  # A worker without rows.
    assert asked([8, 4]) and asked([8, 4])
    assert [bool(asked([5, 4])) for _ in range(17)] == [False] * 15 + [True] * 2
    assert asked([8, 4]) and not asked([0, 4])
    # A shape that comes too seldom is forgotten.
    assert not any(asked([7, 4]) for _ in range(15))
    assert not any(asked([i, 4]) for i in range(100, 1300))
    assert not asked([7, 4])
    others = [bool(asked([i, 4])) for i in range(10, 30) for _ in range(16)]
    assert sum(others) == 14  # There is a limit.
