"""The batches of a divided dataset are those of the dataset, bit by bit."""

from __future__ import annotations

import functools
import time

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tests.data.pipelines import Played, as_written, batches_of, random_pipeline
from tests.harness.tiers import exhaustive, some
from tfdist._src import native
from tfdist._src.data import dataset_graph, division

SEEDS = range(150)
PLAYERS = [(1, 1), (2, 1), (3, 2), (4, 1)]


def check_same(name, make, workers, replicas, passes=2):
    played = Played(make, workers, replicas, passes)
    if played.reason:
        return played
    alone = make()
    for number in range(passes):
        expected = batches_of(alone)
        assert len(played.batches[number]) == len(expected), name
        for batch, wanted in zip(played.batches[number], expected, strict=True):
            for part, other in zip(batch, wanted, strict=True):
                assert part.dtype == other.dtype and part.shape == other.shape, name
                if part.dtype.kind == "f" and played.is_exact:
                    assert part.tobytes() == other.tobytes(), name
                elif part.dtype.kind != "f":
                    assert np.array_equal(part, other), name
                else:
                    np.testing.assert_allclose(part, other, 1e-6, 1e-6, err_msg=name)
    return played


@pytest.mark.parametrize("seed", some(SEEDS, always=range(6)))
def test_random_pipelines_have_the_batches_of_one_process(seed):
    name, make = random_pipeline(seed)
    check_same(name, make, *PLAYERS[seed % len(PLAYERS)])


@exhaustive
def test_most_random_pipelines_are_divided():
    reasons = [Played(random_pipeline(seed)[1], 1).reason for seed in SEEDS]
    assert sum(not reason for reason in reasons) > len(SEEDS) / 3
    assert any("`batch`" in reason for reason in reasons)


def scaled(rows, **how):
    data = tf.data.Dataset.range(rows).map(as_written(lambda x: tf.cast(x, tf.float32)), **how)
    return data.shuffle(50, seed=1).batch(8)


@pytest.mark.parametrize("how", [{}, {"num_parallel_calls": 3}])
def test_each_worker_processes_its_rows_and_the_whole_first_batch(how):
    played = check_same("scaled", lambda: scaled(45, **how), 2, 1, passes=1)
    # The last batch has five rows, of which the first worker has three.
    assert played.rows == 45
    assert played.processed == [5 * 4 + 3 + 8, 5 * 4 + 2 + 8]


def test_a_worker_without_rows_processes_one():
    played = check_same("scaled", lambda: scaled(9), 4, 1, passes=1)
    assert played.processed == [2 + 1 + 8, *[2 + 1 + 8] * 3]


def test_variables_and_tables_are_those_of_the_program():
    factor = tf.Variable(3.0)
    keys = tf.range(10, dtype=tf.int64)
    table = tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer(keys, keys * 7), -1)

    def make():
        look_up = as_written(lambda x: tf.cast(table.lookup(x), tf.float32) * factor)
        return tf.data.Dataset.range(12).map(look_up).batch(4)

    dataset = make()
    found = division.divide(dataset)
    shares = found.shares(tf.TensorSpec([None], tf.float32), worker=1, workers=2)
    for value in (3.0, 5.0):
        factor.assign(value)
        (first, *_), (second, *_) = batches_of(shares)[:2]
        assert np.array_equal(first, np.array([14.0, 21.0], np.float32) * value)
        assert np.array_equal(second, np.array([42.0, 49.0], np.float32) * value)


def counting(x):
    counting.calls += 1
    return np.float32(x + counting.calls)


@functools.cache
def normalization():
    layer = keras.layers.Normalization(mean=[1.0, 2.0, 3.0], variance=[4.0, 5.0, 6.0])
    layer.build((None, 3))
    return layer


BATCH_MAPS = {
    "scaled": lambda x, y: (x / 255.0, y),
    "one hot": lambda x, y: (x, tf.one_hot(y, 10)),
    "reshaped": lambda x, y: (tf.reshape(x, [tf.shape(x)[0], 3, 1]), y),
    "gathered": lambda x, y: (tf.gather(tf.range(50.0), y), y),
    "layer": lambda x, y: (normalization()(x), y),
    "as string": lambda x, y: (tf.strings.as_string(y), x),
    "renamed": lambda x, y: {"inputs": x, "targets": y},
    "weighted": lambda x, y: (x, y, tf.ones_like(y, tf.float32)),
    "row of noise": lambda x, y: (x + tf.random.uniform([tf.shape(x)[0], 1], seed=1), y),
}


@pytest.mark.parametrize("name", some(BATCH_MAPS, always=["scaled", "row of noise"]))
def test_maps_of_batches_process_the_rows_of_a_worker(name):
    normalization()  # creates its weights outside of the dataset's functions

    def make():
        tf.random.set_seed(1)
        keys = tf.range(45, dtype=tf.int64)
        values = tf.reshape(tf.range(135, dtype=tf.float32), [45, 3])
        data = tf.data.Dataset.from_tensor_slices((values, keys)).batch(8)
        return data.map(as_written(BATCH_MAPS[name])).repeat(2)

    played = check_same(name, make, 3, 2, passes=1)
    assert not played.reason
    assert max(played.processed) <= 2 * (5 * 4 + 4) + 8


def test_the_user_can_say_that_a_map_of_batches_treats_rows_separately():
    words = as_written(
        lambda x: tf.strings.split(tf.strings.as_string(x), "").to_tensor(shape=[None, 2])
    )
    dataset = tf.data.Dataset.range(12).batch(4).map(words)
    assert "combines rows" in division.divide(dataset)
    found = division.divide(dataset, always=True)
    spec = tf.TensorSpec([None, 2], tf.string)
    read = batches_of(found.shares(spec, worker=1, workers=2))
    wanted = [batch[0][2:] for batch in batches_of(dataset)]
    assert all(np.array_equal(own[0], rows) for own, rows in zip(read, wanted, strict=True))
    assert found.report().processed == 4 + 3 * 2


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x - tf.reduce_mean(x),
        lambda x: x[::-1],
        lambda x: tf.cumsum(x),
        lambda x: tf.reduce_sum(x),
        lambda x: tf.zeros([4]),
    ],
)
def test_maps_of_batches_that_combine_rows_are_not_divided(function):
    dataset = tf.data.Dataset.range(12).batch(4).map(as_written(function))
    assert "combines rows" in division.divide(dataset)


@pytest.mark.parametrize(
    "later",
    [
        lambda d: d.map(as_written(lambda x: x + 1)).repeat(3),
        lambda d: d.map(as_written(lambda x: x)).repeat(3),
        lambda d: d.prefetch(1).repeat(3),
        lambda d: d.repeat(3),
    ],
)
@pytest.mark.parametrize("of_batches", [False, True])
def test_shuffles_before_repetitions_draw_the_same_orders(later, of_batches):
    def make():
        tf.random.set_seed(1)
        data = tf.data.Dataset.range(45).map(as_written(lambda x: x * 2))
        if of_batches:
            return later(data.batch(4).shuffle(20, seed=1))
        return later(data.shuffle(50, seed=1)).batch(4)

    assert not check_same("shuffled", make, 2, 1).reason


def slowly(x):
    """Returns an element, and later if its number is even."""

    def wait(x):
        time.sleep(0.1 * (x % 2 == 0))
        return x

    return tf.ensure_shape(tf.numpy_function(wait, [x], tf.int64), [])


def with_free_order(dataset):
    options = tf.data.Options()
    options.deterministic = False
    return dataset.with_options(options)


def mapped_freely(dataset):
    return dataset.map(as_written(slowly), num_parallel_calls=4, deterministic=False)


@pytest.mark.parametrize(
    "make",
    [
        lambda d: with_free_order(d.map(as_written(slowly), num_parallel_calls=4)),
        mapped_freely,
        lambda d: d.batch(12).flat_map(
            as_written(lambda x: mapped_freely(tf.data.Dataset.from_tensor_slices(x)))
        ),
        lambda d: d.interleave(
            as_written(lambda x: tf.data.Dataset.from_tensors(x).map(as_written(slowly))),
            cycle_length=4,
            num_parallel_calls=4,
            deterministic=False,
        ),
    ],
)
@pytest.mark.parametrize("divided", [False, True])
def test_elements_have_the_same_order_on_all_workers(make, divided):
    dataset = make(tf.data.Dataset.range(12))
    native.load_ops()
    if divided:
        dataset = dataset.map(as_written(lambda x: x + 0)).batch(4)
        found = division.divide(dataset, always=True)
        shares = found.shares(tf.TensorSpec([None], tf.int64))
    else:
        shares = dataset_graph.make_deterministic(dataset.batch(4))
    rows = np.concatenate([part for (part,) in batches_of(shares)])
    assert rows.tolist() == list(range(12))


def test_a_free_order_is_refused_where_it_cannot_be_changed(monkeypatch):
    monkeypatch.setattr(native, "has_ops", lambda: False)
    once = as_written(lambda x: tf.data.Dataset.from_tensors(x).repeat(2))
    for order in (None, False):
        data = tf.data.Dataset.range(12)
        data = data.interleave(once, num_parallel_calls=2, deterministic=order).batch(4)
        if order is None:
            assert len(list(dataset_graph.make_deterministic(data))) == 6
        else:
            with pytest.raises(tfdist.errors.UnsupportedError, match="deterministic=False"):
                dataset_graph.make_deterministic(data)


def test_a_shuffle_without_a_seed_is_not_divided():
    tf.random.set_seed(None)
    data = tf.data.Dataset.range(12).map(as_written(lambda x: x + 1)).shuffle(5).batch(4)
    assert "without a seed" in division.divide(data)


def test_a_variable_that_another_map_changes_is_read_in_order():
    count = tf.Variable(0, dtype=tf.int64)
    data = tf.data.Dataset.range(12).map(as_written(lambda x: x + 0 * count.assign_add(1)))
    data = data.map(as_written(lambda x: x * count)).batch(4)
    assert "no `map`" in division.divide(data)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda d: d.batch(4), "no `map`"),
        (lambda d: d.map(as_written(lambda x: x + 1)).batch(4).cache(), "stage Cache"),
        (
            lambda d: d.batch(4).map(
                as_written(lambda x: tf.numpy_function(lambda y: y, [x], tf.int64))
            ),
            "calls Python",
        ),
        (lambda d: d.map(as_written(lambda x: tf.ragged.range(x))).batch(4), "not dense"),
        (
            lambda d: d.map(
                as_written(lambda x: tf.numpy_function(counting, [x], tf.float32))
            ).batch(4),
            "no `map`",
        ),
    ],
)
def test_other_pipelines_are_not_divided(make, reason):
    found = division.divide(make(tf.data.Dataset.range(10)))
    assert isinstance(found, str) and reason in found


def test_a_map_with_state_is_not_divided():
    total = tf.Variable(0, dtype=tf.int64)
    data = tf.data.Dataset.range(10).map(as_written(lambda x: x + total.assign_add(x)))
    assert "no `map`" in division.divide(data.batch(4))


def test_a_difference_is_an_error_unless_batches_are_compared():
    counting.calls = 0
    shape = as_written(lambda x: tf.ensure_shape(tf.numpy_function(counting, [x], tf.float32), []))
    dataset = tf.data.Dataset.range(12).map(shape).batch(4)
    found = division.divide(dataset, always=True)
    shares = found.shares(tf.TensorSpec([None], tf.float32), worker=0, workers=2)
    with pytest.raises(tf.errors.InvalidArgumentError, match="Component 0 of a batch depends on"):
        batches_of(shares)
    assert found.report().differing == 0


def test_an_iterator_is_restored_where_it_was(tmp_path):
    dataset = scaled(45, num_parallel_calls=2)
    shares = division.divide(dataset).shares(
        tf.TensorSpec([None], tf.float32), worker=1, workers=2, replicas=2
    )
    iterator = iter(shares)
    for _ in range(3):
        next(iterator)
    path = tf.train.Checkpoint(iterator=iterator).save(str(tmp_path / "saved"))
    expected = [part.numpy().tolist() for part in iterator]
    again = iter(shares)
    tf.train.Checkpoint(iterator=again).restore(path)
    assert [part.numpy().tolist() for part in again] == expected


def test_only_what_depends_on_drawn_numbers_is_not_compared():
    @tf.function
    def noisy(x, y):
        noise = tf.random.normal([])
        return {"x": x + noise, "y": y, "z": tf.cond(noise > 0, lambda: x, lambda: y)}

    def named(parts, number):
        return number, parts["y"] * 2.0, parts["x"], parts["z"], parts["y"] + parts["x"]

    values = tf.range(8.0)
    data = tf.data.Dataset.from_tensor_slices((values, values))
    data = data.map(as_written(lambda x, y: noisy(x, y)), num_parallel_calls=2)
    data = tf.data.Dataset.zip(data, tf.data.Dataset.range(8)).map(as_written(named)).batch(4)
    assert division.divide(data).drawn == {2, 3, 4}
    swapped = data.map(as_written(lambda a, b, c, d, e: (c, a, b)))
    assert division.divide(swapped).drawn == {0}


def test_draws_of_workers_differ():
    tf.random.set_seed(1)
    draw = as_written(lambda x: tf.random.uniform([], seed=3))
    drawn = []
    for worker in range(2):
        dataset = tf.data.Dataset.range(8).map(draw, num_parallel_calls=2).batch(4)
        shares = division.divide(dataset, worker=worker).shares(
            tf.TensorSpec([None], tf.float32), worker=worker, workers=2
        )
        drawn.append(np.concatenate([batch[0] for batch in batches_of(shares)]))
    assert len(set(np.concatenate(drawn).tolist())) == 8
