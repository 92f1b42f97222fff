"""Each replica's rows of every batch, in datasets of our operation and in functions."""

import numpy as np
import pytest
import tensorflow as tf

from tests.harness.tiers import exhaustive, some
from tfdist._src import native
from tfdist._src.comm.communicator_interface import Alone
from tfdist._src.data.shares import Replay, split_batches

ROWS = 14
BATCH = 5  # the last one has four rows


class Worker(Alone):
    """One of three."""

    size = 3

    def __init__(self, rank):
        self.rank = rank
        self._place = tf.Variable([rank, self.size])

    def place(self):
        """As a group's does that may change: read whenever the graph runs."""
        place = tf.raw_ops.ReadVariableOp(resource=self._place.handle, dtype=tf.int32)
        return place[0], place[1]


COMPONENTS = {
    "tensor": np.arange(ROWS * 3, dtype="float32").reshape(ROWS, 3),
    "aligned": np.arange(ROWS * 16, dtype="float32").reshape(ROWS, 16),
    "text": np.array([f"row {i}" for i in range(ROWS)]),
    "bool": np.arange(ROWS) % 3 == 0,
    "structure": {"a": np.arange(ROWS), "b": (np.arange(ROWS) * 2, np.arange(ROWS) * 3)},
    "ragged": lambda: tf.RaggedTensor.from_row_lengths(np.repeat(np.arange(ROWS), 2), [2] * ROWS),
    "sparse": lambda: tf.sparse.from_dense(np.eye(ROWS, dtype="int32")),
    "with_none": (np.arange(ROWS), None),
}


@pytest.fixture(autouse=True)
def operations():
    native.load_ops()


def batches(kind="tensor"):
    components = COMPONENTS[kind]
    rows = components() if callable(components) else components
    return tf.data.Dataset.from_tensor_slices(rows).batch(BATCH)


def dense(element):
    """Its components as arrays, or lists where rows differ in length."""
    leaves = []
    for leaf in tf.nest.flatten(element):
        if isinstance(leaf, tf.SparseTensor):
            leaves.append(tf.sparse.to_dense(leaf).numpy().tolist())
        elif isinstance(leaf, tf.RaggedTensor):
            leaves.append(leaf.to_list())
        elif isinstance(leaf, tf.Tensor):
            leaves.append(leaf.numpy().tolist())
    return leaves


def elements(dataset):
    return [dense(element) for element in dataset]


@exhaustive
@pytest.mark.parametrize("kind", COMPONENTS)
def test_all_shares_together_are_the_batches(kind, monkeypatch):
    for replicas in (1, 2):
        check_shares(kind, replicas)
    monkeypatch.setattr(native, "has_ops", lambda: False)  # in functions
    for replicas in (1, 2):
        check_shares(kind, replicas)


def check_shares(kind, replicas):
    shares = [elements(split_batches(batches(kind), Worker(r), replicas, None)) for r in range(3)]
    whole = elements(batches(kind))
    for number, batch in enumerate(whole):
        own = range(number * replicas, (number + 1) * replicas)
        parts = [worker[i] for worker in shares for i in own]
        for component, rows in enumerate(batch):
            assert [row for part in parts for row in part[component]] == rows
            sizes = [len(part[component]) for part in parts]
            assert max(sizes) - min(sizes) <= 1
            assert sizes == sorted(sizes, reverse=True)
    assert all(len(worker) == len(whole) * replicas for worker in shares)


def test_shares_can_be_computed_with():
    """TensorFlow's kernels take memory that begins where they want it."""
    for kind in ("tensor", "aligned"):
        for element in split_batches(batches(kind), Worker(1), 1, None):
            product = tf.matmul(element, element, transpose_b=True).numpy()
            np.testing.assert_allclose(product, element.numpy() @ element.numpy().T)


def test_what_is_known_of_the_shapes():
    exact = tf.data.Dataset.from_tensor_slices(COMPONENTS["tensor"]).batch(6, drop_remainder=True)
    for dataset, fixed, rows in (
        (exact, 3, 2),
        (exact, None, None),
        (exact, 4, None),
        (batches(), 3, None),
    ):
        assert split_batches(dataset, Worker(0), 1, fixed).element_spec.shape == [rows, 3]


def test_the_number_of_batches():
    assert int(split_batches(batches(), Worker(0), 2, None).cardinality()) == 6
    endless = split_batches(batches().repeat(), Worker(0), 2, None)
    assert int(endless.cardinality()) == tf.data.INFINITE_CARDINALITY


def test_rows_of_a_scalar():
    dataset = split_batches(
        tf.data.Dataset.from_generator(
            lambda: iter([1.0]), output_signature=tf.TensorSpec(None, tf.float32)
        ),
        Worker(0),
        1,
        None,
    )
    with pytest.raises(tf.errors.InvalidArgumentError, match="must yield batches"):
        next(iter(dataset))


@pytest.mark.parametrize("kind", some(COMPONENTS, always=["structure", "sparse"]))
def test_a_batch_is_given_again(kind):
    replay = Replay()
    iterator = iter(split_batches(batches(kind), Worker(0), 1, None, replay))
    expected = elements(split_batches(batches(kind), Worker(0), 1, None))
    assert dense(next(iterator)) == expected[0]
    replay.request()
    assert dense(next(iterator)) == expected[0]
    assert dense(next(iterator)) == expected[1]
    assert replay.given == 2
    assert dense(next(iterator)) == expected[2]
    replay.request()
    assert dense(next(iterator)) == expected[2]
    assert replay.given == 3
    with pytest.raises(StopIteration):
        next(iterator)


@exhaustive
@pytest.mark.parametrize("kind", ["structure", "sparse"])
def test_a_batch_that_was_read_in_part_is_given_again_as_a_whole(kind):
    """A step that fails may have read the rows of the first of three devices only."""
    replay = Replay()
    iterator = iter(split_batches(batches(kind), Worker(0), 3, None, replay))
    expected = elements(split_batches(batches(kind), Worker(0), 3, None))
    assert dense(next(iterator)) == expected[0]
    replay.request()
    assert [dense(next(iterator)) for _ in range(6)] == expected[:6]
    assert replay.given == 2


def test_nothing_is_given_again_before_the_first():
    replay = Replay()
    replay.request()
    assert len(elements(split_batches(batches(), Worker(0), 1, None, replay))) == 3
    assert replay.given == 3


@pytest.mark.parametrize(
    ("taken", "replicas", "replays"), [(1, 1, True), (3, 1, False), (1, 2, True), (4, 2, True)]
)
def test_an_iterator_is_saved_and_restored(taken, replicas, replays, tmp_path):
    replay = Replay() if replays else None
    dataset = split_batches(batches("structure"), Worker(1), replicas, None, replay)
    expected = elements(dataset)
    iterator = iter(dataset)
    for _ in range(taken):
        next(iterator)
    path = tf.train.Checkpoint(iterator=iterator).write(str(tmp_path / "iterator"))
    other = iter(dataset)
    tf.train.Checkpoint(iterator=other).read(path).assert_consumed()
    again = 0
    if replay is not None and taken % replicas == 0:
        replay.request()
        again = replicas
    assert [dense(element) for element in other] == expected[taken - again :]


def test_a_replay_that_is_gone():
    replay = Replay()
    dataset = split_batches(batches(), Worker(0), 1, None, replay)
    del replay
    with pytest.raises(tf.errors.OpError, match="does not exist in this process"):
        next(iter(dataset))


@pytest.mark.parametrize("natively", [True, False])
def test_arrays_that_a_generator_yields_stay_as_they_are(natively, monkeypatch):
    """TensorFlow computes in place where it takes a tensor's memory for its own."""
    if not natively:
        monkeypatch.setattr(native, "has_ops", lambda: False)
    memory = np.zeros(64 * 16 * 4 + 64, np.uint8)
    start = -memory.ctypes.data % 64  # Others are copied for their alignment.
    array = memory[start : start + 64 * 16 * 4].view(np.float32).reshape(64, 16)
    array[:] = 1.0

    def generate():
        for row in range(0, 64, 32):
            yield array[row : row + 32]

    spec = tf.TensorSpec([None, 16], tf.float32)
    dataset = tf.data.Dataset.from_generator(generate, output_signature=spec)
    for share in split_batches(dataset, Alone(), 2, 2).map(lambda rows: rows * 0.5):
        assert (share.numpy() == 0.5).all()
    assert (array == 1.0).all()
