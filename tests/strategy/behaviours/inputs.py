"""Kinds of input, and batches that do not divide."""

from __future__ import annotations

import tempfile
import time

import keras
import numpy as np
import tensorflow as tf

import tfdist
from tests.strategy.behaviours.common import (
    batches,
    compile_mlp,
    cross_entropy,
    fit,
    outcome,
    rows,
    scope,
)


def shuffled_arrays(strategy):
    x, y = rows(50)
    model = compile_mlp(strategy)
    return outcome(model, fit(model, x, y, batch_size=16, shuffle=True, epochs=3))


def last_batch_does_not_divide(strategy):
    x, y = rows(45)
    model = compile_mlp(strategy)
    history = fit(model, x, y, batch_size=20, validation_data=rows(17, seed=2))
    return outcome(model, history, predictions=model.predict(x, batch_size=20, verbose=0))


def first_batch_does_not_divide(strategy):
    x, y = rows(35)
    model = compile_mlp(strategy)
    return outcome(model, fit(model, batches(x, y, 7)))


def fewer_rows_than_workers(strategy):
    x, y = rows(9)
    model = compile_mlp(strategy)
    history = fit(model, batches(x, y, 8), epochs=3)
    evaluation = model.evaluate(x[:1], y[:1], verbose=0)
    predictions = model.predict(x[:1], verbose=0)
    return outcome(model, history, evaluation=evaluation, predictions=predictions)


def plain_batch_normalization_with_fewer_rows(strategy):
    # Each replica normalises its own rows, so only the weights can be compared, among workers.
    x, y = rows(17)
    with scope(strategy):
        model = keras.Sequential(
            [
                keras.Input((8,)),
                keras.layers.Dense(8),
                keras.layers.BatchNormalization(),
                keras.layers.Dense(3),
            ]
        )
        model.compile("sgd", cross_entropy())
    fit(model, batches(x, y, 16), epochs=3)
    finite = all(np.isfinite(w).all() for w in model.get_weights())
    mean = model.layers[1].moving_mean.numpy()
    return {"finite": finite, "moved": bool(np.abs(mean).max() > 0)}


def sample_weight(strategy):
    x, y = rows(45)
    weights = np.random.default_rng(5).random(45).astype("float32")
    model = compile_mlp(strategy, weighted_metrics=["accuracy"])
    validation = (*rows(11, seed=3), weights[:11])
    history = fit(model, x, y, sample_weight=weights, batch_size=20, validation_data=validation)
    return outcome(model, history)


def class_weight(strategy):
    x, y = rows(45)
    model = compile_mlp(strategy)
    return outcome(model, fit(model, x, y, class_weight={0: 1.0, 1: 3.0, 2: 0.5}, batch_size=20))


def validation_split(strategy):
    x, y = rows(50)
    model = compile_mlp(strategy)
    return outcome(model, fit(model, x, y, validation_split=0.3, batch_size=16))


def dataset_sharded_by_data(strategy):
    return _with_policy(strategy, tf.data.experimental.AutoShardPolicy.DATA)


def dataset_sharded_automatically(strategy):
    return _with_policy(strategy, tf.data.experimental.AutoShardPolicy.AUTO)


def _with_policy(strategy, policy):
    x, y = rows(45)
    dataset = batches(x, y, 20).with_options(_options(policy))
    model = compile_mlp(strategy)
    history = fit(model, dataset, validation_data=batches(*rows(13, seed=1), 4))
    return outcome(model, history, evaluation=model.evaluate(dataset, verbose=0))


def _options(policy):
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = policy
    return options


def dataset_with_shuffle_and_repeat(strategy):
    x, y = rows(40)
    keras.utils.set_random_seed(1)  # The order follows from both seeds.
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(40, seed=3).repeat().batch(12)
    model = compile_mlp(strategy)
    return outcome(model, fit(model, dataset, steps_per_epoch=4, epochs=3))


def dataset_of_dicts_with_weights(strategy):
    x, y = rows(30)
    with scope(strategy):
        a, b = keras.Input((8,), name="a"), keras.Input((8,), name="b")
        out = keras.layers.Dense(3)(keras.layers.Add()([a, b]))
        model = keras.Model({"a": a, "b": b}, out)
        model.compile("sgd", cross_entropy(), weighted_metrics=["accuracy"])
    elements = ({"a": x, "b": x[::-1]}, y, np.linspace(0, 1, 30, dtype="float32"))
    dataset = tf.data.Dataset.from_tensor_slices(elements).batch(11)
    return outcome(model, fit(model, dataset))


def static_batches(strategy):
    x, y = rows(40)
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(12, drop_remainder=True)
    model = compile_mlp(strategy)
    return outcome(model, fit(model, dataset))


def py_dataset(strategy):
    class Rows(keras.utils.PyDataset):
        def __init__(self):
            super().__init__()
            self.x, self.y = rows(45)

        def __len__(self):
            return 4

        def __getitem__(self, i):
            return self.x[i * 13 : (i + 1) * 13], self.y[i * 13 : (i + 1) * 13]

    model = compile_mlp(strategy)
    history = fit(model, Rows(), shuffle=False)
    return outcome(model, history, predictions=model.predict(Rows(), verbose=0))


def shuffled_py_dataset(strategy):
    class Rows(keras.utils.PyDataset):
        def __len__(self):
            return 5

        def __getitem__(self, i):
            return rows(9, seed=i)

    model = compile_mlp(strategy)
    return outcome(model, fit(model, Rows(), shuffle=True, epochs=3))


def generator(strategy):
    def produce():
        for i in range(100):
            yield rows(7, seed=i)

    model = compile_mlp(strategy)
    return outcome(model, fit(model, produce(), steps_per_epoch=4))


def generator_that_ends(strategy):
    def produce():
        for i in range(5):
            yield rows(7, seed=i)

    model = compile_mlp(strategy)
    return outcome(model, fit(model, produce(), epochs=1))


def distributed_dataset(strategy):
    x, y = rows(45)
    model = compile_mlp(strategy)
    dataset = batches(x, y, 20)
    if strategy:
        dataset = strategy.experimental_distribute_dataset(dataset)
    return outcome(model, fit(model, dataset, steps_per_epoch=3))


def datasets_from_function(strategy):
    # Uneven: the first pipeline has one row in three, the others share the rest.
    x, y = rows(36)
    model = compile_mlp(strategy)

    def produce(context):
        share = 12 // context.num_input_pipelines
        first = context.input_pipeline_id * share
        chosen = [i for i in range(36) if first <= i % 12 < first + share]
        return batches(x[chosen], y[chosen], share)

    dataset = batches(x, y, 12)
    if strategy:
        dataset = strategy.distribute_datasets_from_function(produce)
    return outcome(model, fit(model, dataset, epochs=2))


def different_numbers_of_batches(strategy):
    # Worker 0 has all the rows, the others fewer and fewer: every step counts who is there.
    x, y = rows(24)
    model = compile_mlp(strategy)

    def produce(context):
        count = 24 if context.input_pipeline_id == 0 else 0
        return batches(x[:count], y[:count], 6)

    dataset = batches(x, y, 6)
    if strategy:
        dataset = strategy.distribute_datasets_from_function(produce)
    return outcome(model, fit(model, dataset, epochs=2))


def other_ends(strategy):
    """Datasets without an end, with an end, and of an unknown length are no different to a step."""
    x, y = rows(18)
    finite = batches(x, y, 7)
    unknown = finite.filter(lambda x, y: tf.size(y) > 0)
    model = compile_mlp(strategy, steps_per_execution=2)
    logs = [fit(model, finite.repeat(), steps_per_epoch=4, epochs=1)]
    tested = [model.evaluate(finite.repeat(), steps=2, verbose=0)]
    for dataset in (finite, unknown, finite):
        logs.append(fit(model, dataset, epochs=1))
        tested.append(model.evaluate(dataset, verbose=0))
    return outcome(model, logs, tested=tested, predicted=model.predict(finite, verbose=0))


def files_are_read_once(strategy):
    """Sharded by file, batches differ from one process's; every row must count once."""
    with tempfile.TemporaryDirectory() as folder:
        for i in range(4):
            with open(f"{folder}/{i}.txt", "w") as file:
                file.writelines(f"{100 * i + row}\n" for row in range(5 + i))
        dataset = tf.data.TextLineDataset(sorted(tf.io.gfile.glob(f"{folder}/*.txt")))
        dataset = dataset.map(lambda line: tf.strings.to_number(line)[None]).batch(4)
        with scope(strategy):
            model = keras.Sequential([keras.Input((1,)), keras.layers.Identity()])
            metric = keras.metrics.Sum(name="sum")
            model.compile(loss=lambda y, p: 0.0 * p, metrics=[_SumOfPredictions()])
        policy = tf.data.experimental.AutoShardPolicy.FILE
        labelled = dataset.map(lambda x: (x, x)).with_options(_options(policy))
        result = model.evaluate(labelled, verbose=0, return_dict=True)
        del metric
        return {"sum": result["sum_of_predictions"]}


def _lines(folder, count):
    """Writes files, and returns their names."""
    paths = [f"{folder}/{i}.txt" for i in range(count)]
    for i, path in enumerate(paths):
        with open(path, "w") as file:
            file.writelines(f"{100 * i + row}\n" for row in range(5 + i))
    return paths


def _parsed(line):
    number = tf.strings.to_number(line)
    return tf.stack([number / 300.0, 1.0]), number / 100.0


def _fit_on_lines(strategy, dataset):
    with scope(strategy):
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    return outcome(model, fit(model, dataset, epochs=3))


def files_that_are_preprocessed_by_rows(strategy):
    with tempfile.TemporaryDirectory() as folder:
        names = tf.data.Dataset.from_tensor_slices(_lines(folder, 3))
        dataset = names.interleave(tf.data.TextLineDataset, num_parallel_calls=2)
        dataset = dataset.map(_parsed).shuffle(20, seed=1).batch(4)
        policy = tf.data.experimental.AutoShardPolicy.DATA
        return _fit_on_lines(strategy, dataset.with_options(_options(policy)))


def fewer_files_than_workers(strategy):
    with tempfile.TemporaryDirectory() as folder:
        dataset = tf.data.TextLineDataset(_lines(folder, 1)).map(_parsed).batch(4)
        policy = tf.data.experimental.AutoShardPolicy.FILE
        return _fit_on_lines(strategy, dataset.with_options(_options(policy)))


def rows_in_any_order(strategy):
    """Reads elements as soon as they are ready; each must be on one worker."""

    def slowly(x):
        def wait(x):
            time.sleep(0.02 * (x % 2 == int(strategy is None or tfdist.rank())))
            return x

        return tf.ensure_shape(tf.numpy_function(wait, [x], tf.int64), [])

    dataset = tf.data.Dataset.range(32).map(slowly, num_parallel_calls=4, deterministic=False)
    dataset = dataset.batch(8)
    if strategy is None:
        return {"rows": sorted(row for batch in dataset for row in batch.numpy().tolist())}
    rows = []
    for batch in strategy.experimental_distribute_dataset(dataset):
        rows += strategy.gather(batch, axis=0).numpy().tolist()
    return {"rows": sorted(rows)}


class _SumOfPredictions(keras.metrics.Sum):
    def __init__(self):
        super().__init__(name="sum_of_predictions")

    def update_state(self, y_true, y_pred, sample_weight=None):
        return super().update_state(y_pred)


def predictions_from_files_keep_their_order(strategy):
    with tempfile.TemporaryDirectory() as folder:
        for i in range(3):
            with open(f"{folder}/{i}.txt", "w") as file:
                file.writelines(f"{100 * i + row}\n" for row in range(5))
        dataset = tf.data.TextLineDataset(sorted(tf.io.gfile.glob(f"{folder}/*.txt")))
        dataset = dataset.map(lambda line: tf.strings.to_number(line)[None]).batch(4)
        with scope(strategy):
            model = keras.Sequential([keras.Input((1,)), keras.layers.Identity()])
        return {"predictions": model.predict(dataset, verbose=0)}


def string_and_integer_features(strategy):
    words = np.array(["a", "b", "c", "a", "d", "b", "c"] * 5)
    numbers = np.arange(35)
    with scope(strategy):
        text = keras.Input((1,), dtype="string")
        count = keras.Input((1,), dtype="int32")
        lookup = keras.layers.StringLookup(vocabulary=["a", "b", "c", "d"], output_mode="one_hot")
        scaled = keras.layers.Rescaling(0.02)(count)
        features = keras.layers.Concatenate()([lookup(text), scaled])
        model = keras.Model([text, count], keras.layers.Dense(3)(features))
        model.compile("sgd", cross_entropy(), metrics=["accuracy"])
    x = (tf.constant(words[:, None]), tf.constant(numbers[:, None], tf.int32))
    dataset = tf.data.Dataset.from_tensor_slices((x, numbers % 3)).batch(10)
    return outcome(model, fit(model, dataset))


def string_predictions(strategy):
    words = tf.constant([["x"], ["why"], [""], ["zee"], ["ü"]])
    with scope(strategy):
        text = keras.Input((1,), dtype="string")
        model = keras.Model(text, _Upper()(text))
    dataset = tf.data.Dataset.from_tensor_slices(words).batch(3)
    return {"predictions": model.predict(dataset, verbose=0)}


class _Upper(keras.layers.Layer):
    def call(self, x):
        return tf.strings.upper(x)

    def compute_output_spec(self, x):
        return keras.KerasTensor(x.shape, "string")


class SemiSupervised(keras.Model):
    """Compares two views of many images, and classifies others of which there are less."""

    def __init__(self):
        super().__init__()
        self.encoder, self.head = keras.layers.Dense(20, "tanh"), keras.layers.Dense(3)

    def build(self, shape):
        self.encoder.build(shape)
        self.head.build((None, 20))

    def call(self, x):
        return self.head(self.encoder(x))

    def train_step(self, data):
        unlabeled, (labeled, y) = data[:2]
        with tf.GradientTape() as tape:
            one, two = self.encoder(unlabeled), self.encoder(unlabeled + 0.1)
            scores = keras.ops.matmul(one, keras.ops.transpose(two))
            pairs = -keras.ops.mean(keras.ops.diagonal(keras.ops.log_softmax(scores)))
            z = self(labeled, training=True)
            loss = pairs + self.compute_loss(labeled, y, z)
        weights = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        return {**self.compute_metrics(labeled, y, z), "pairs": pairs}


def batches_beside_batches(strategy):
    """Two batches of different sizes in one, the larger of which is divided."""
    x, y = rows(18)
    others = np.random.default_rng(2).normal(size=(33, 8)).astype("float32")
    unlabeled = tf.data.Dataset.from_tensor_slices(others).batch(11)
    labeled = tf.data.Dataset.from_tensor_slices((x, y)).batch(6)
    with scope(strategy):
        model = SemiSupervised()
        model.build((None, 8))
        model.compile("adam", cross_entropy(), metrics=["accuracy"])
    history = fit(model, tf.data.Dataset.zip((unlabeled, labeled)))
    logs = model.train_on_batch(others[:7], (x[:2], y[:2]), return_dict=True)
    return outcome(model, history, logs=logs)


def graphs(strategy):
    """A batch is a graph: its nodes, and its edges as pairs of nodes."""

    class Convolution(keras.layers.Layer):
        def build(self, shapes):
            self.kernel = self.add_weight(shape=(shapes[0][-1], 5))

        def call(self, inputs):
            nodes, edges = inputs
            sent = tf.gather(keras.ops.matmul(nodes, self.kernel), edges[:, 0])
            return keras.ops.tanh(
                tf.math.unsorted_segment_sum(sent, edges[:, 1], tf.shape(nodes)[0])
            )

    def make(seed):
        generator = np.random.default_rng(seed)
        count, edges = 7 + seed, 17 - seed
        nodes = generator.normal(size=(count, 4)).astype("float32")
        pairs = generator.integers(0, count, (edges, 2)).astype("int32")
        return (nodes, pairs), generator.normal(size=(count, 2)).astype("float32")

    signature = (
        (tf.TensorSpec((None, 4)), tf.TensorSpec((None, 2), tf.int32)),
        tf.TensorSpec((None, 2)),
    )
    data = tf.data.Dataset.from_generator(lambda: map(make, range(3)), output_signature=signature)
    data = data.apply(tf.data.experimental.assert_cardinality(3))
    with scope(strategy):
        nodes, edges = keras.Input((4,)), keras.Input((2,), dtype="int32")
        hidden = Convolution()([nodes, edges])
        outputs = keras.layers.Dense(2)(Convolution()([hidden, edges]))
        model = keras.Model([nodes, edges], outputs)
        model.compile(keras.optimizers.Adam(0.01, epsilon=1e-3), "mse", metrics=["mae"])
    history = fit(model, data)
    logs = model.evaluate(data, verbose=0)
    first, _ = make(0)
    predictions = [model.predict(data, verbose=0), model.predict_on_batch(first)]
    return outcome(model, history, logs=logs, predictions=predictions)


def seeds_without_a_common_seed(strategy):
    """Shuffles and draws with seeds of operations, in a program without a seed of its own."""
    x, y = rows(32)
    model = compile_mlp(strategy)
    tf.random.set_seed(None)
    fit(model, x, y, batch_size=32)  # the workers take over the chief's seed
    data = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(20, seed=3).repeat()
    data = data.map(lambda x, y: (x + tf.random.uniform([8], seed=5), y)).batch(8)
    numbers = tf.random.normal([3], seed=7)
    history = fit(model, data, epochs=3, steps_per_epoch=3)
    return outcome(model, history, numbers=numbers.numpy())
