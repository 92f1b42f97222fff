"""Random input pipelines, and their division among workers that one process plays."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist._src.data import division

as_written = tf.autograph.experimental.do_not_convert
Make = Callable[[], Any]


def random_pipeline(seed: int) -> tuple[str, Make]:
    """Returns the names of up to eight random stages, and a function that creates the dataset."""
    draw = random.Random(seed)
    rows = draw.choice([1, 7, 24, 45])
    stages = [draw.choice(list(_ELEMENTS)) for _ in range(draw.randint(1, 5))]
    batch = draw.choice([2, 5, 8, 64])
    drops = draw.random() < 0.25
    later = [draw.choice(list(_BATCHES)) for _ in range(draw.randint(0, 2))]
    numbers = [draw.randint(1, 100) for _ in range(8)]

    def make() -> Any:
        tf.random.set_seed(seed)
        dataset = tf.data.Dataset.range(rows).map(as_written(_row))
        for stage, number in zip(stages, numbers, strict=False):
            dataset = _ELEMENTS[stage](dataset, number)
        dataset = dataset.batch(batch, drop_remainder=drops)
        for stage, number in zip(later, numbers[5:], strict=False):
            dataset = _BATCHES[stage](dataset, number)
        return dataset

    return f"{rows} rows: {', '.join([*stages, f'batch {batch}', *later])}", make


def _row(number: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    return number, tf.cast(number, tf.float32) / 7.0 + tf.range(3, dtype=tf.float32)


def _change(number: int) -> Any:
    def change(key: tf.Tensor, values: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        return key + number, tf.math.sin(values * number)

    return as_written(change)


def _draw(number: int) -> Any:
    def change(key: tf.Tensor, values: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        return key, values + tf.random.stateless_normal([3], [key, number])

    return as_written(change)


def _zipped(dataset: Any, number: int) -> Any:
    other = dataset.map(_change(number + 1)).map(as_written(lambda key, values: values[:2]))
    join = as_written(lambda one, more: (one[0], tf.concat([one[1], more], 0)[:3]))
    return tf.data.Dataset.zip((dataset.map(_change(number)), other)).map(join)


def _numbered(dataset: Any, number: int) -> Any:
    mix = as_written(lambda i, row: (row[0] + i, row[1] * tf.cast(i % 5, tf.float32)))
    return dataset.enumerate().map(mix)


def _windows(dataset: Any, number: int) -> Any:
    gather = as_written(
        lambda keys, values: tf.data.Dataset.zip((keys, values)).batch(3).map(_of_window)
    )
    return dataset.window(1 + number % 3, drop_remainder=False).flat_map(gather)


@as_written
def _of_window(keys: tf.Tensor, values: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    return keys[0], tf.reduce_sum(values, 0)


def _scanned(dataset: Any, number: int) -> Any:
    add = as_written(lambda total, row: (total + row[0], (total, row[1])))
    return dataset.scan(tf.constant(0, tf.int64), add)


def _interleaved(dataset: Any, number: int) -> Any:
    once = as_written(lambda *row: tf.data.Dataset.from_tensors(row).repeat(2))
    return dataset.interleave(once, cycle_length=1 + number % 4)


_ELEMENTS: dict[str, Callable[[Any, int], Any]] = {
    "map": lambda d, n: d.map(_change(n)),
    "parallel map": lambda d, n: d.map(_change(n), num_parallel_calls=3),
    "tuned map": lambda d, n: d.map(_change(n), num_parallel_calls=tf.data.AUTOTUNE),
    "seeded draws": lambda d, n: d.map(_draw(n), num_parallel_calls=2),
    "shuffle": lambda d, n: d.shuffle(1 + n, seed=n),
    "fixed shuffle": lambda d, n: d.shuffle(1 + n, seed=n, reshuffle_each_iteration=False),
    "repeat": lambda d, n: d.repeat(1 + n % 2),
    "take": lambda d, n: d.take(n),
    "skip": lambda d, n: d.skip(n % 5),
    "shard": lambda d, n: d.shard(2, n % 2),
    "prefetch": lambda d, n: d.prefetch(1 + n % 3),
    "zip": _zipped,
    "enumerate": _numbered,
    "filter": lambda d, n: d.filter(as_written(lambda key, values: key % 3 != n % 3)),
    "interleave": _interleaved,
    "concatenate": lambda d, n: d.concatenate(d.map(_change(n))),
    "cache": lambda d, n: d.cache(),
    "window": _windows,
    "scan": _scanned,
    "unbatch": lambda d, n: d.batch(1 + n % 3).unbatch(),
    "take while": lambda d, n: d.take_while(as_written(lambda key, values: key < 1000)),
    "options": lambda d, n: d.with_options(tf.data.Options()),
}

_BATCHES: dict[str, Callable[[Any, int], Any]] = {
    "prefetch": lambda d, n: d.prefetch(1 + n % 3),
    "tuned prefetch": lambda d, n: d.prefetch(tf.data.AUTOTUNE),
    "repeat": lambda d, n: d.repeat(1 + n % 2),
    "take": lambda d, n: d.take(n),
    "skip": lambda d, n: d.skip(n % 2),
    "shuffle": lambda d, n: d.shuffle(1 + n, seed=n),
    "map": lambda d, n: d.map(_change(n)),
    "cache": lambda d, n: d.cache(),
}


def batches_of(dataset: Any) -> list[list[np.ndarray]]:
    """Returns the components of all batches."""
    return [[part.numpy() for part in tf.nest.flatten(batch)] for batch in dataset]


class Played:
    """The batches that workers read, each in a pass of its own.

    Args:
        make: creates the dataset.
        workers: the number of workers.
        replicas: the number of replicas of each worker.
        passes: how often each worker reads the dataset.

    Attributes:
        reason: why the dataset is not divided; "" if it is.
        is_exact: whether the batches must be equal bit by bit.
        batches: for each pass, the components of the joined batches.
        processed: the number of elements that each worker has processed.
        rows: the number of rows of all batches.
    """

    def __init__(self, make: Make, workers: int, replicas: int = 1, passes: int = 1) -> None:
        self.reason, self.processed, self.rows, self.is_exact = "", [], 0, True
        read: list[list[list[list[np.ndarray]]]] = []
        for worker in range(workers):
            dataset = make()
            found = division.divide(dataset, worker=worker)
            if isinstance(found, str):
                self.reason = found
                return
            spec = tf.nest.map_structure(_any_rows, dataset.element_spec)
            shares = found.shares(spec, worker=worker, workers=workers, replicas=replicas)
            self.is_exact = found.is_exact
            read.append([batches_of(shares) for _ in range(passes)])
            report = found.report()
            assert report.differing == -1 and not report.is_whole
            self.rows = report.rows
            self.processed.append(report.processed)
        self.batches = [
            _joined([of_worker[number] for of_worker in read], replicas) for number in range(passes)
        ]


def _any_rows(spec: tf.TensorSpec) -> tf.TensorSpec:
    return tf.TensorSpec([None, *spec.shape[1:]], spec.dtype)


def _joined(workers: list[list[list[np.ndarray]]], replicas: int) -> list[list[np.ndarray]]:
    assert len({len(shares) for shares in workers}) == 1
    batches = []
    for start in range(0, len(workers[0]), replicas):
        shares = [share for worker in workers for share in worker[start : start + replicas]]
        batches.append([np.concatenate(parts) for parts in zip(*shares, strict=True)])
    return batches
