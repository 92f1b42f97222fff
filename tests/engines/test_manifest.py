"""Jobs as `tfdist manifest` writes them: pods that come late, fail, are preempted, and join."""

import subprocess
import sys
import time

import pytest

from tests.engines.conftest import ROOT, clean_environment, loss_in
from tests.engines.kubelet import kubelet
from tests.harness.tiers import exhaustive

pytestmark = pytest.mark.timeout(600)
# A signal that worker 1 gets once, in its step 12, and how many workers there are to be at the end.
TRAIN = """
import os, pathlib, signal, sys
import keras, numpy, tfdist
what, folder, awaited = sys.argv[1], pathlib.Path(sys.argv[2]), int(sys.argv[3])
mark = folder / "trains"
class Happen(keras.callbacks.Callback):
    steps = 0
    def on_train_batch_end(self, batch, logs=None):
        self.steps += 1
        if self.steps == 12 and tfdist.rank() == 1 and not mark.exists():
            mark.touch()
            if what != "nothing":
                os.kill(os.getpid(), getattr(signal, what))
    def on_epoch_end(self, epoch, logs=None):
        self.model.stop_training = epoch >= 1 and tfdist.size() == awaited
keras.utils.set_random_seed(1)
strategy = tfdist.MultiWorkerMirroredStrategy()
with strategy.scope():
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(16, "relu"),
                              keras.layers.Dropout(0.2, seed=3), keras.layers.Dense(1)])
    model.compile("adam", "mse")
x = numpy.random.default_rng(0).normal(size=(640, 8)).astype("float32")
callbacks = [Happen(), tfdist.callbacks.BackupAndRestore(folder / "snapshots", save_every=5)]
if os.environ.get("TFDIST_ELASTIC"):
    callbacks.append(tfdist.callbacks.Elastic(min_workers=1))
model.fit(x, x.sum(1), batch_size=32, epochs=100_000, verbose=0, callbacks=callbacks)
weights = numpy.concatenate([w.numpy().ravel() for w in model.weights])
print(f"weights {weights.astype('float64').sum():.12f} of {tfdist.size()} workers", flush=True)
"""


def manifest(*arguments):
    command = [sys.executable, "-m", "tfdist", "manifest", "--name", "train", "--image", "x"]
    return subprocess.run(
        [*command, *arguments],
        env=clean_environment(),
        cwd=ROOT,
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    ).stdout


@pytest.fixture
def pods(tmp_path):
    with kubelet(2, tmp_path) as made:
        yield made


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    path = tmp_path_factory.mktemp("train") / "train.py"
    path.write_text(TRAIN)
    return path


@pytest.fixture(scope="module")
def undisturbed(script, tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed")
    with kubelet(2, folder) as pods:
        pods.apply(manifest(str(script), "nothing", str(folder), "2"))
        pods.start(0)
        pods.start(1)
        assert pods.run() == "Complete", pods.said()
        return weights_in(pods)


def weights_in(pods, workers=2):
    """What all workers have trained."""
    logs = [pods.log(index).read_text() for index in range(workers)]
    found = [line for log in logs for line in log.splitlines() if line.startswith("weights ")]
    assert len(found) == workers and len(set(found)) == 1, pods.said()
    return found[0]


@exhaustive
def test_pods_come_one_after_the_other(pods, alone):
    pods.apply(manifest("examples/char_lm.py", "--epochs=1", "--steps=20"))
    pods.start(0)
    log = pods.log(0)
    while "waiting for" not in log.read_text():
        time.sleep(0.2)
    pods.start(1)
    assert pods.run() == "Complete", pods.said()
    assert loss_in(pods.said()) == pytest.approx(alone, abs=2e-3)
    assert pods.lives() == [1, 1]


@exhaustive
def test_the_probes_of_all_workers_succeed(pods, script, tmp_path):
    pods.apply(manifest(str(script), "nothing", str(tmp_path), "3"))  # It trains on and on.
    for index in range(2):
        pods.start(index)
    for index in range(2):
        while not pods.answers(index):
            time.sleep(0.2)


@exhaustive
@pytest.mark.parametrize(("what", "counted"), [("SIGKILL", True), ("SIGTERM", False)])
def test_a_worker_fails_or_is_preempted(pods, script, tmp_path, undisturbed, what, counted):
    pods.apply(manifest(str(script), what, str(tmp_path), "2"))
    pods.start(0)
    pods.start(1)
    assert pods.run() == "Complete", pods.said()
    assert weights_in(pods) == undisturbed, pods.said()
    assert pods.lives() == [2, 2], pods.said()
    assert list(pods.failures.values()) == ([1, 1] if counted else [0, 0])


@exhaustive
def test_an_elastic_job_replaces_a_worker(pods, script, tmp_path):
    pods.apply(manifest("--elastic", str(script), "SIGKILL", str(tmp_path), "2"))
    pods.start(0)
    pods.start(1)
    assert pods.run() == "Complete", pods.said()
    assert pods.lives() == [1, 2], pods.said()
    assert weights_in(pods, 2).endswith("of 2 workers")


@exhaustive
def test_an_elastic_job_that_is_given_more_pods(script, tmp_path):
    """As `kubectl patch` does with completions and parallelism: the pods' variables stay."""
    with kubelet(3, tmp_path) as pods:
        pods.apply(manifest("--elastic", str(script), "nothing", str(tmp_path), "3"))
        pods.start(0)
        pods.start(1)
        while not (tmp_path / "trains").exists():
            time.sleep(0.2)
        pods.start(2)
        assert pods.run() == "Complete", pods.said()
        assert pods.lives() == [1, 1, 1], pods.said()
        assert weights_in(pods, 3).endswith("of 3 workers")


@exhaustive
def test_a_wrong_command_line_ends_the_job(pods):
    pods.apply(manifest("examples/char_lm.py", "--no-such-flag"))
    pods.start(0)
    assert pods.run() in ("PodFailurePolicy 0", "FailedIndexes 0")
