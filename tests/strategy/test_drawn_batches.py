"""Batches drawn from the rows of a dataset's own: each row once, and the same from any position."""

import random

import numpy as np
import pytest
import tensorflow as tf

from tests.harness.tiers import exhaustive
from tfdist._src import native
from tfdist._src.comm.communicator_interface import Alone
from tfdist._src.data.shares import Replay, split_batches
from tfdist._src.internals.iterators import position_of, set_position
from tfdist.errors import UnsupportedError

OWN = [4, 4, 2, 4, 4, 4, 3]
ROWS = sum(OWN)
ENDS = np.cumsum(OWN).tolist()


@pytest.fixture(autouse=True)
def operations():
    native.load_ops()


def drawn(sizes=OWN):
    """A dataset of batches of such sizes, and what it passes through."""
    ends = np.cumsum(sizes)

    def batch(start, end):
        values = tf.range(start, end)
        return {"x": values, "names": tf.strings.as_string(values)}

    dataset = tf.data.Dataset.from_tensor_slices((ends - sizes, ends)).map(batch)
    # The first one twice, as for `fit`.
    dataset = dataset.enumerate().flat_map(
        lambda i, batch: tf.data.Dataset.from_tensors(batch).repeat(1 + tf.cast(i == 0, tf.int64))
    )
    replay = Replay(keeps_rows=True)
    dataset = split_batches(dataset, Alone(), 1, None, replay)
    replay.keep_rows(1)
    return dataset, replay


def begin(dataset):
    iterator = iter(dataset)
    next(iterator)
    return iterator


def rows_of(iterator):
    batch = next(iterator)
    values = batch["x"].numpy().tolist()
    assert [int(name) for name in batch["names"].numpy()] == values
    return values


def end_of(start, size):
    """Where a batch of a size ends, or one of the usual size."""
    if size is None and start in (0, *ENDS):
        return next(end for end in ENDS if end > start)
    return min(start + (size or OWN[0]), ROWS)


@exhaustive
@pytest.mark.parametrize("seed", range(40))
def test_each_row_once_from_any_position(seed):
    choose = random.Random(seed)
    dataset, replay = drawn()
    iterator = begin(dataset)
    begun = end = 0
    while end < ROWS:
        if end > begun and choose.random() < 0.3:
            replay.request()
        else:
            begun = end
        size = choose.choice([None, None, 1, 3, 5, 9])
        if size:
            replay._core.tfd_replay_want(replay.number, size)
        end = end_of(begun, size)
        assert rows_of(iterator) == list(range(begun, end))
        assert replay.read().given == end
        assert replay.read(before_last=True).given == begun
        move = choose.choice(["", "", "saved", "skipped"])
        if move == "saved":
            other = iter(dataset)
            set_position(other, position_of(iterator))
            iterator = other
        elif move == "skipped":
            dataset, replay = drawn()
            iterator = begin(dataset)
            replay.skip(end, lambda: next(iterator))  # noqa: B023
            begun = end
    with pytest.raises(StopIteration):
        next(iterator)


@exhaustive
@pytest.mark.parametrize(("workers", "rows"), [(1, 8), (2, 4), (3, 3), (5, 2), (16, 1)])
def test_the_rows_of_a_batch(workers, rows):
    """One worker now, and so many before."""
    dataset, replay = drawn([8, 8, 8])
    replay.keep_rows(workers)
    iterator = begin(dataset)
    assert (replay.dataset_batch, replay.batch_for(1), replay.batch_for(workers)) == (8, rows, 8)
    assert len(rows_of(iterator)) == rows


@exhaustive
def test_no_batch_may_be_larger_than_the_first():
    dataset, replay = drawn([4, 4, 5])
    replay.keep_rows(2)
    iterator = begin(dataset)
    with pytest.raises(tf.errors.InvalidArgumentError, match="larger than its first one"):
        for _ in range(5):
            next(iterator)


@exhaustive
def test_the_rows_must_have_one_shape():
    dataset = tf.data.Dataset.range(1, 5).map(lambda length: tf.zeros([4, length]))
    replay = Replay(keeps_rows=True)
    iterator = begin(split_batches(dataset, Alone(), 1, None, replay))
    replay.keep_rows(2)
    with pytest.raises(tf.errors.InvalidArgumentError, match="must have the same shape"):
        for _ in range(3):
            next(iterator)


@exhaustive
@pytest.mark.parametrize(
    "spec", [tf.RaggedTensorSpec([None, None]), tf.SparseTensorSpec([None, 3])]
)
def test_other_tensors_are_refused(spec):
    dataset = tf.data.Dataset.from_generator(lambda: iter([]), output_signature=spec)
    with pytest.raises(UnsupportedError, match="dense tensors"):
        split_batches(dataset, Alone(), 1, None, Replay(keeps_rows=True))
