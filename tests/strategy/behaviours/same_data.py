"""Data that the workers share, or do not."""

from __future__ import annotations

import tempfile

import keras
import numpy as np
import tensorflow as tf

from tests.strategy.behaviours.common import batches, compile_mlp, fit, outcome, rows
from tests.strategy.behaviours.faults import message


class _Batches(keras.utils.PyDataset):
    def __init__(self, x, y):
        super().__init__()
        self.x, self.y = x, y

    def __len__(self):
        return 3

    def __getitem__(self, i):
        return self.x[4 * i : 4 * i + 4], self.y[4 * i : 4 * i + 4]


def sharded_by_hand(strategy):
    """What is said of data of which each worker has taken its part already, by kind."""
    rank, size = strategy.extended.worker_rank, strategy.extended.worker_count
    x, y = rows(24)
    mine = x[rank::size], y[rank::size]
    whole = tf.data.Dataset.from_tensor_slices((x, y))
    repeated = tf.data.Dataset.from_tensor_slices(mine).repeat().batch(4)
    model = compile_mlp(strategy)
    before = model.get_weights()

    def generate():
        for i in range(3):
            yield mine[0][4 * i : 4 * i + 4], mine[1][4 * i : 4 * i + 4]

    said = {
        "arrays": message(lambda: fit(model, *mine, batch_size=4)),
        "tensors": message(lambda: fit(model, *map(tf.constant, mine), batch_size=4)),
        "tf.data": message(lambda: fit(model, batches(*mine, 4))),
        "Dataset.shard": message(lambda: fit(model, whole.shard(size, rank).batch(4))),
        "steps": message(lambda: fit(model, repeated, steps_per_epoch=2)),
        "augmented": message(lambda: fit(model, batches(*mine, 4).map(_with_noise))),
        "generator": message(lambda: fit(model, generate())),
        "PyDataset": message(lambda: fit(model, _Batches(*mine), shuffle=False)),
        "evaluate": message(lambda: model.evaluate(*mine, batch_size=4, verbose=0)),
        "predict": message(lambda: model.predict(mine[0], batch_size=4, verbose=0)),
    }
    untouched = all(map(np.array_equal, before, model.get_weights()))
    said["validation"] = message(lambda: fit(model, x, y, epochs=1, validation_data=mine))
    fit(model, x, y)  # They are still together.
    return said, untouched, model.get_weights()


def files_sharded_by_hand(strategy):
    """What is said of lists of files that differ among workers, by kind."""
    rank, size = strategy.extended.worker_rank, strategy.extended.worker_count
    model = compile_mlp(strategy)
    with tempfile.TemporaryDirectory() as folder:
        names = [f"{folder}/{i}.txt" for i in range(4)]
        for name in names:
            with open(name, "w") as file:
                file.writelines(f"{row}\n" for row in range(4))

        def parsed(lines):
            x = lines.map(lambda line: tf.fill([8], tf.strings.to_number(line)))
            return x.map(lambda x: (x, 1)).batch(4)

        def interleaved(names):
            return parsed(names.interleave(tf.data.TextLineDataset))

        slices = tf.data.Dataset.from_tensor_slices
        listed = tf.data.Dataset.list_files(f"{folder}/*.txt")
        off = tf.data.Options()
        off.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
        said = {
            "reader": message(
                lambda: fit(model, parsed(tf.data.TextLineDataset(names[rank::size])))
            ),
            "interleave": message(lambda: fit(model, interleaved(slices(names[rank::size])))),
            "Dataset.shard": message(lambda: fit(model, interleaved(listed.shard(size, rank)))),
            "one worker": message(
                lambda: fit(model, batches(*rows(16), 4) if rank else interleaved(slices(names)))
            ),
            "order": message(lambda: fit(model, interleaved(slices(names[:: -1 if rank else 1])))),
        }
        # The same, though in separate folders.
        fit(model, parsed(tf.data.TextLineDataset(names)))
        fit(model, interleaved(listed))
        fit(model, interleaved(slices(names[rank::size])).with_options(off))
    return said


def _with_noise(x, y):
    return x + tf.random.normal(tf.shape(x)), y


def other_sizes(strategy):
    """What is said of workers that differ in how they cut the same rows into batches."""
    rank = strategy.extended.worker_rank
    x, y = rows(24)
    endless = tf.data.Dataset.from_tensor_slices((x, y)).repeat().batch(4 + rank)
    model = compile_mlp(strategy)
    return {
        "batch_size": message(lambda: fit(model, x, y, batch_size=4 + rank)),
        "tf.data": message(lambda: fit(model, batches(x, y, 4 + 2 * rank))),
        "steps": message(lambda: fit(model, endless, steps_per_epoch=2)),
        "rows": message(lambda: fit(model, x[: 24 - 8 * rank], y[: 24 - 8 * rank], batch_size=4)),
        "validation_split": message(lambda: fit(model, x, y, validation_split=0.25 * (1 + rank))),
        "class_weight": message(lambda: fit(model, x, y, class_weight={0: 1, 1: 1 + rank, 2: 1})),
        "validation_data": message(
            lambda: fit(model, x, y, validation_data=None if rank else (x, y))
        ),
    }


def same_rows_otherwise_augmented(strategy):
    """Each worker draws noise of its own for the same rows."""
    rank = strategy.extended.worker_rank if strategy else 0
    x, y = rows(24)
    generator = np.random.default_rng(rank)

    def noisy(x):
        return x + 0.1 * generator.normal(size=x.shape).astype("float32")

    def augment(x, y):
        return tf.ensure_shape(tf.numpy_function(noisy, [x], tf.float32), [None, 8]), y

    model = compile_mlp(strategy)
    fit(model, batches(x, y, 8).map(augment))
    fit(model, ((noisy(x), y) for _ in range(4)), steps_per_epoch=2)
    return model.get_weights()


def weights_of_classes(strategy):
    """Weights of classes in other orders and types, and for data that is distributed already."""
    x, y = rows(12)
    weights = {0: 1.0, 1: 2.0, 2: 3.0}
    distributed = batches(x, y, 4)
    said = ""
    if strategy:
        distributed = strategy.experimental_distribute_dataset(distributed)
        if strategy.extended.worker_rank:
            weights = {np.int64(c): np.float32(weights[c]) for c in reversed(weights)}
        model = compile_mlp(strategy)
        said = message(lambda: fit(model, distributed, class_weight=weights))
    model = compile_mlp(strategy)
    return outcome(model, fit(model, x, y, class_weight=weights)), said


def shuffled_anew_each_epoch(strategy):
    x, y = rows(40)
    model = compile_mlp(strategy)
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(40).batch(12)
    return outcome(model, fit(model, dataset, epochs=3, validation_data=dataset))


def a_generator_is_read_once(strategy):
    """Every batch that it yields is trained on, and in order."""
    x, y = rows(40)
    numbers = []

    def generate():
        for i in range(10):
            numbers.append(i)
            yield x[4 * i : 4 * i + 4], y[4 * i : 4 * i + 4]

    model = compile_mlp(strategy)
    history = fit(model, generate(), epochs=2, steps_per_epoch=5)
    return outcome(model, history, numbers=numbers)
