"""A local cluster of Ray with several nodes."""

from __future__ import annotations

import os
import pathlib
import re
import signal
import subprocess
import sys
import threading

import numpy as np
import pytest

from tests.harness.tiers import exhaustive

ray = pytest.importorskip("ray", reason="Ray is not installed: pip install -e '.[ray]'")

from ray.train import FailureConfig, RunConfig  # noqa: E402

from tests.engines.conftest import SCRIPT  # noqa: E402
from tests.engines.on_ray import cluster, on_workers  # noqa: E402
from tests.launch.conftest import until  # noqa: E402
from tfdist.ray import ReportCallback, Trainer  # noqa: E402

# Ray warns of its own deprecated settings.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

ROWS, FEATURES = 64, 4


# A process can be connected to one cluster at a time. So tests with clusters of their own precede
# the tests that use this one.
@pytest.fixture(scope="module")
def two_nodes():
    with cluster(2, log_to_driver=False):
        yield


def run_in(folder):
    """What runs a function on workers, and returns Ray's result."""

    def run(loop, *, count=2, failures=0, config=None, **more):
        return Trainer(
            loop,
            train_loop_config={"folder": str(folder / "run"), **(config or {})},
            scaling_config=on_workers(count),
            run_config=RunConfig(
                name="run",
                storage_path=str(folder / "storage"),
                failure_config=FailureConfig(max_failures=failures),
            ),
            **more,
        ).fit()

    return run


@pytest.fixture
def run(tmp_path):
    return run_in(tmp_path)


def rows():
    x = np.random.default_rng(0).normal(size=(ROWS, FEATURES)).astype("float32")
    return x, x.sum(1, keepdims=True)


def build():
    """A model with dropout, in the scope of a strategy."""
    import keras

    import tfdist

    keras.utils.set_random_seed(1)
    with tfdist.MultiWorkerMirroredStrategy().scope():
        layers = [
            keras.Input((FEATURES,)),
            keras.layers.Dense(16, "relu"),
            keras.layers.Dropout(0.2, seed=3),
            keras.layers.Dense(1),
        ]
        model = keras.Sequential(layers)
        model.compile("adam", "mse", metrics=[keras.metrics.F1Score(threshold=0.5, name="f1")])
    return model


def killing(config):
    """Ends this process at the 10th step, once in a run, if it is rank 1."""
    import keras

    import tfdist

    done = pathlib.Path(config["folder"]) / "killed"

    class Kill(keras.callbacks.Callback):
        steps = 0

        def on_train_batch_end(self, batch, logs=None):
            self.steps += 1
            if self.steps == 10 and tfdist.rank() == 1 and not done.exists():
                done.touch()
                os.kill(os.getpid(), signal.SIGKILL)

    return Kill()


def waiting(config):
    """Waits at the 10th step, once in a run, until its node is taken away, if it is rank 1."""
    import keras

    import tfdist

    node = pathlib.Path(config["folder"]) / "node"

    class Wait(keras.callbacks.Callback):
        steps = 0

        def on_train_batch_end(self, batch, logs=None):
            self.steps += 1
            if self.steps == 10 and tfdist.rank() == 1 and not node.exists():
                write_whole(node, ray.get_runtime_context().get_node_id())
                threading.Event().wait()

    return Wait()


def announced(config):
    """Ends the training once Ray's notice has led to a snapshot."""
    import keras

    import tfdist

    folder = pathlib.Path(config["folder"])

    class Announced(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if tfdist.rank() == 1 and not (folder / "node").exists():
                write_whole(folder / "node", ray.get_runtime_context().get_node_id())

        def on_epoch_end(self, epoch, logs=None):
            saved = list((folder / "snapshots").glob("step-*/*.npz"))
            if saved and tfdist.rank() == 0:
                (folder / "saved").write_text(saved[0].parent.name)
                self.model.stop_training = True

    return Announced()


def fit_until_saved(config):
    import tfdist

    folder = pathlib.Path(config["folder"])
    folder.mkdir(exist_ok=True)
    backup = tfdist.callbacks.BackupAndRestore(folder / "snapshots", save_every=10**9)
    report = ReportCallback(checkpoint_every=0, backup=backup, preemption_every=1)
    model = build()
    callbacks = [announced(config), report, backup]
    model.fit(*rows(), batch_size=8, epochs=10**6, verbose=0, callbacks=callbacks)


def write_whole(path, text):
    path.with_suffix(".part").write_text(text)
    path.with_suffix(".part").rename(path)


def fit(config):
    """Three epochs of eight steps, from snapshots if there are any."""
    import tfdist

    folder = pathlib.Path(config["folder"])
    folder.mkdir(exist_ok=True)
    callbacks = [
        *([waiting(config)] if config.get("wait") else []),
        *([killing(config)] if config.get("kill") else []),
        ReportCallback(checkpoint_every=2),
        tfdist.callbacks.BackupAndRestore(folder / "snapshots", save_every=3),
    ]
    model = build()
    model.fit(*rows(), batch_size=8, epochs=3, verbose=0, callbacks=callbacks)
    return weights(model)


def fit_on_ray_data(config):
    """Steps with all rows, from each worker's shard of a dataset of Ray."""
    import keras

    import tfdist

    shard = ray.train.get_dataset_shard("train")
    strategy = tfdist.MultiWorkerMirroredStrategy()
    with strategy.scope():
        model = linear(keras)
    dataset = strategy.distribute_datasets_from_function(
        lambda context: shard.to_tf("x", "y", batch_size=ROWS)
    )
    model.fit(dataset, epochs=5, verbose=0)
    return weights(model)


def fail(config):
    import tfdist

    build()
    if tfdist.rank() == 1:
        raise ValueError("no such customer")


def linear(keras):
    keras.utils.set_random_seed(2)
    model = keras.Sequential([keras.Input((FEATURES,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.05), "mse")
    return model


def weights(model):
    import tfdist

    values = [variable.numpy().tolist() for variable in model.weights]
    secret = os.environ["TFDIST_SECRET"]
    return {"values": values, "workers": tfdist.size(), "secret": secret}


def same(result, expected, **tolerance):
    for value, wanted in zip(result["values"], expected, strict=True):
        np.testing.assert_allclose(value, wanted, **tolerance)


@pytest.fixture(scope="module")
def one_process():
    model = build()
    model.fit(*rows(), batch_size=8, epochs=3, verbose=0)
    return [variable.numpy() for variable in model.weights]


@pytest.fixture(scope="module")
def undisturbed(two_nodes, tmp_path_factory):
    return run_in(tmp_path_factory.mktemp("undisturbed"))(fit)


@exhaustive
@pytest.mark.parametrize("trainer", ["tfdist", "tensorflow"])
def test_the_example_trains_as_one_process(train, trainer):
    train([sys.executable, "-m", "tests.engines.on_ray", trainer], SCRIPT[1:])


@exhaustive
def test_a_node_is_taken_away(one_process, tmp_path):
    with cluster(2, log_to_driver=False) as nodes:
        marker = tmp_path / "run" / "node"

        def take_away():
            until(marker.exists)
            name = marker.read_text()
            (found,) = [node for node in nodes.worker_nodes if node.node_id == name]
            nodes.remove_node(found, allow_graceful=False)

        threading.Thread(target=take_away, daemon=True).start()
        result = run_in(tmp_path)(fit, count=(1, 2), failures=1, config={"wait": True})
    assert result.return_value["workers"] == 1
    same(result.return_value, one_process, atol=1e-5)


@exhaustive
def test_a_node_is_about_to_be_taken_away(tmp_path):
    with cluster(2, log_to_driver=False) as nodes:
        marker = tmp_path / "run" / "node"

        def announce():
            until(marker.exists)
            ray_command = [sys.executable, "-m", "ray.scripts.scripts", "drain-node"]
            reason = ["--reason=DRAIN_NODE_REASON_PREEMPTION", "--reason-message=spot"]
            where = [f"--address={nodes.address}", f"--node-id={marker.read_text()}"]
            limit = "--deadline-remaining-seconds=600"
            subprocess.run([*ray_command, *where, *reason, limit], check=True)

        threading.Thread(target=announce, daemon=True).start()
        run_in(tmp_path)(fit_until_saved)
    assert re.fullmatch(r"step-\d+-[0-9a-f]+", (tmp_path / "run" / "saved").read_text())


@exhaustive
def test_a_killed_worker(one_process, undisturbed, run):
    same(undisturbed.return_value, one_process, atol=1e-5)
    undisturbed, killed = (
        undisturbed.return_value,
        run(fit, failures=1, config={"kill": True}).return_value,
    )
    same(killed, undisturbed["values"], rtol=0, atol=0)
    secrets = {result["secret"] for result in (undisturbed, killed)}
    assert len(secrets) == 2 and all(len(secret) >= 32 for secret in secrets)


@exhaustive
def test_metrics_and_checkpoints(undisturbed):
    import keras

    assert len(undisturbed.metrics["f1"]) == 1  # One for each of the model's outputs.
    second, third = (metrics["loss"] for _, metrics in undisturbed.best_checkpoints)
    assert undisturbed.metrics["loss"] == third < second
    with undisturbed.checkpoint.as_directory() as folder:
        model = keras.models.load_model(pathlib.Path(folder) / "model.keras")
    same(undisturbed.return_value, [v.numpy() for v in model.weights], rtol=0, atol=0)


@exhaustive
def test_an_exception_of_a_worker_is_raised(two_nodes, run):
    with pytest.raises(ray.train.WorkerGroupError, match="no such customer"):
        run(fail)


@exhaustive
def test_ray_data_trains_as_one_process(two_nodes, run):
    import keras

    x, y = rows()
    dataset = ray.data.from_items([{"x": a, "y": b} for a, b in zip(x, y, strict=True)])
    result = run(fit_on_ray_data, datasets={"train": dataset}).return_value
    model = linear(keras)
    model.fit(x, y, batch_size=ROWS, epochs=5, verbose=0)
    assert result["workers"] == 2
    same(result, [v.numpy() for v in model.weights], atol=1e-5)
