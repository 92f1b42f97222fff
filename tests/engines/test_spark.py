"""A local cluster of Spark with two executors."""

from __future__ import annotations

import contextlib
import os
import pathlib
import re
import signal
import sys
import threading
import uuid
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from tests.harness.tiers import exhaustive

pytest.importorskip("pyspark.sql", reason="Spark is not installed: pip install -e '.[spark]'")
from tests.engines.conftest import SCRIPT, needs
from tests.engines.on_spark import session
from tests.launch.conftest import MARK, marked, until
from tfdist.spark import Distributor, get_dataset_shard

# Spark warns of newer versions of what it uses.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

ROWS, FEATURES = 64, 4
IDENTITY = uuid.uuid4().hex


@pytest.fixture(scope="module")
def spark():
    needs("java", package="openjdk-17-jre-headless")
    with session(**{f"spark.executorEnv.{MARK}": IDENTITY}) as found:
        yield found


def rows():
    x = np.random.default_rng(0).normal(size=(ROWS, FEATURES)).astype("float32")
    return x, x.sum(1)


def linear():
    import keras

    import tfdist

    keras.utils.set_random_seed(2)
    strategy = tfdist.MultiWorkerMirroredStrategy()
    with strategy.scope():
        model = keras.Sequential([keras.Input((FEATURES,)), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.05, momentum=0.9), "mse")
    return strategy, model


def weights(model):
    return [variable.numpy() for variable in model.weights]


def fit(folder, *, kill):
    """Three epochs of eight steps; rank 1 may be killed at the 10th, once."""
    import keras

    import tfdist

    killed = pathlib.Path(folder) / "killed"

    class Kill(keras.callbacks.Callback):
        steps = 0

        def on_train_batch_end(self, batch, logs=None):
            self.steps += 1
            if kill and self.steps == 10 and tfdist.rank() == 1 and not killed.exists():
                killed.touch()
                os.kill(os.getpid(), signal.SIGKILL)

    _, model = linear()
    snapshots = tfdist.callbacks.BackupAndRestore(pathlib.Path(folder) / "snapshots", save_every=3)
    model.fit(*rows(), batch_size=8, epochs=3, verbose=0, callbacks=[Kill(), snapshots])
    print(f"rank {tfdist.rank()} has trained")
    return tfdist.size(), weights(model)


def fit_on_rows():
    """Steps with all rows."""
    strategy, model = linear()
    shard = get_dataset_shard()
    assert shard.element_spec["name"] == tf.TensorSpec((), tf.string)
    names = sorted(row["name"].numpy().decode() for row in shard)
    assert int(shard.cardinality()) == len(names)
    batches = shard.map(lambda row: (row["x"], row["y"])).batch(ROWS)
    model.fit(
        strategy.distribute_datasets_from_function(lambda context: batches), epochs=5, verbose=0
    )
    return names, weights(model)


def fail(rank):
    import tfdist

    linear()
    if tfdist.rank() == rank:
        raise ValueError("no such customer")


def same(found, expected, **tolerance):
    for value, wanted in zip(found, expected, strict=True):
        np.testing.assert_allclose(value, wanted, **tolerance)


def workers():
    """The processes that run functions of this session."""
    found = []
    for pid in marked(IDENTITY):
        with contextlib.suppress(OSError):
            if b"tfdist._src.spark.worker" in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(pid)
    return found


@exhaustive
def test_the_example(train):
    needs("java", package="openjdk-17-jre-headless")
    train([sys.executable, "-m", "tests.engines.on_spark"], SCRIPT[1:])


@exhaustive
def test_a_killed_worker(spark, tmp_path, capfd):
    for name in ("undisturbed", "killed"):
        (tmp_path / name).mkdir()
    distributor = Distributor(num_processes=2, max_restarts=1)
    size, undisturbed = distributor.run(fit, tmp_path / "undisturbed", kill=False)
    shown = capfd.readouterr().out
    assert "[0] rank 0 has trained" in shown and "[1] rank 1 has trained" in shown
    assert size == 2
    _, model = linear()
    model.fit(*rows(), batch_size=8, epochs=3, verbose=0)
    same(undisturbed, weights(model), atol=1e-5)
    _, killed = distributor.run(fit, tmp_path / "killed", kill=True)
    assert (tmp_path / "killed" / "killed").exists()
    same(killed, undisturbed, rtol=0, atol=0)
    assert re.search(r"tfdist: worker [01] ended with .*; restart 1 of 1", capfd.readouterr().out)
    until(lambda: not workers())


@exhaustive
def test_an_exception_ends_the_stage(spark):
    with pytest.raises(RuntimeError, match=r"(?s)^worker [01] ended with exit.*no such customer"):
        Distributor(num_processes=2).run(fail, 1)
    until(lambda: not workers())


@exhaustive
@pytest.mark.parametrize("parquet", [False, True])
def test_rows_of_spark(spark, tmp_path, parquet):
    x, y = rows()
    records = [
        (f"row {i}", a.tolist(), float(b)) for i, (a, b) in enumerate(zip(x, y, strict=True))
    ]
    frame = spark.createDataFrame(records, "name string, x array<float>, y float")
    if parquet:
        frame.write.parquet(str(tmp_path / "rows"))
        frame = str(tmp_path / "rows")
    names, found = Distributor(num_processes=2).run_on_dataframe(fit_on_rows, frame)
    assert 0 < len(names) < ROWS
    _, model = linear()
    model.fit(x, y, batch_size=ROWS, epochs=5, verbose=0)
    same(found, weights(model), atol=1e-5)


def specification():
    shard = get_dataset_shard()
    return str(shard.element_spec), int(shard.cardinality()), len(list(shard))


@exhaustive
def test_a_worker_without_rows_has_the_same_columns(spark):
    frame = spark.createDataFrame([([1.0, 2.0], True)], "x array<double>, b boolean").limit(1)
    found = Distributor(2).run_on_dataframe(specification, frame)
    assert found[0] == str(
        {
            "x": tf.TensorSpec([2], tf.float64, None),
            "b": tf.TensorSpec([], tf.bool, None),
        }
    )
    assert found[1] == found[2] <= 1


@exhaustive
@pytest.mark.parametrize(
    ("columns", "values", "message"),
    [
        (
            "x date",
            [(None,)],
            r"column 'x' of the DataFrame has the type date, which has no tensor",
        ),
        ("x int, x int", [(1, 2)], "several columns named 'x'"),
        ("x int", [(None,)], "^column 'x' of the DataFrame has nulls: fill"),
        ("x array<int>", [([None],)], "column 'x' of the DataFrame has nulls in its arrays"),
        ("x array<int>", [([1],), ([1, 2],)], "arrays of different lengths: pad them"),
        ("x int", [], "the DataFrame has no rows"),
        ("x int", None, "the DataFrame has no rows"),
    ],
)
def test_rows_that_cannot_be_tensors(spark, columns, values, message):
    # Spark does not even begin where it knows that there are none.
    frame = spark.createDataFrame([(1,)], columns).limit(0) if values is None else None
    frame = frame or spark.createDataFrame(values, columns)
    with pytest.raises(ValueError, match=message):
        Distributor(2).run_on_dataframe(specification, frame)


def generator():
    return (number for number in range(3))


@exhaustive
def test_a_result_that_cannot_be_sent(spark):
    with pytest.raises(RuntimeError, match="a generator, cannot be sent to the driver"):
        Distributor(2).run(generator)


def end():
    linear()
    sys.exit()


@exhaustive
def test_a_function_that_ends_the_process(spark):
    assert Distributor(2).run(end) is None


@exhaustive
def test_on_the_driver(spark, tmp_path, capfd):
    size, _ = Distributor(2, local_mode=True).run(fit, tmp_path, kill=False)
    assert size == 2 and "[1] rank 1 has trained" in capfd.readouterr().out
    with pytest.raises(RuntimeError, match="no such customer"):
        Distributor(2, local_mode=True).run(fail, 0)


@exhaustive
def test_what_is_refused(spark):
    with pytest.raises(ValueError, match=r"must be a positive integer. Received: 0"):
        Distributor(0)
    with pytest.raises(ValueError, match=r"`max_restarts` must not be negative. Received: -1"):
        Distributor(2, max_restarts=-1)
    with pytest.raises(ValueError, match=r"needs spark.task.resource.gpu.amount to be at least 1"):
        Distributor(2, use_gpu=True)
    with pytest.raises(ValueError, match=r"A script takes no keyword arguments. Received: epochs"):
        Distributor(2).run("train.py", epochs=3)
    with pytest.raises(ValueError, match=r"no script 'nowhere.py' in"):
        Distributor(2).run("nowhere.py")
    with pytest.raises(ValueError, match="create datasets, models and locks inside the function"):
        Distributor(2).run(fail, threading.Lock())
    with pytest.raises(ValueError, match=r"must be a DataFrame of Spark.* Received: a list"):
        Distributor(2).run_on_dataframe(fail, [1])
    with pytest.raises(ValueError, match="local_mode=False"):
        Distributor(2, local_mode=True).run_on_dataframe(fit, spark.range(3))
    with pytest.raises(ValueError, match="no rows from Spark"):
        get_dataset_shard()
