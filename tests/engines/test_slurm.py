"""srun and sbatch on a cluster of two nodes."""

import os
import re
import time

import pytest

from tests.engines.conftest import ROOT, SCRIPT, clean_environment, run
from tests.engines.slurm_cluster import slurm_cluster
from tests.harness.tiers import exhaustive

JOIN = """
import tfdist
strategy = tfdist.MultiWorkerMirroredStrategy()
group = strategy.extended.group
hosts = sorted({w.address.rpartition(':')[0] for w in group.topology.workers})
print(f"worker {tfdist.rank()} of {tfdist.size()} on {hosts}, secret: {bool(group.options.secret)}")
"""


@pytest.fixture(scope="module")
def cluster():
    with slurm_cluster() as started:
        yield started


@exhaustive
def test_srun_trains_as_one_process(cluster, train):
    train(cluster.inside("srun", "-N", "2", "-n", "2"), **cluster.variables)


@exhaustive
@pytest.mark.parametrize("distribution", ["block", "cyclic", "plane=2"])
def test_whatever_the_distribution(cluster, distribution):
    srun = cluster.inside("srun", "-N", "2", "-n", "3", "-m", distribution)
    output = run([*srun, SCRIPT[0], "-c", JOIN], clean_environment(**cluster.variables))
    found = re.findall(r"worker (\d) of 3 on \['n1'\], secret: True", output)
    assert sorted(found) == ["0", "1", "2"], output
    assert "anyone who can reach" not in output


@exhaustive
@pytest.mark.parametrize("mpi", ["none", "pmi2"])
def test_workers_on_one_node_meet(cluster, mpi):
    srun = cluster.inside("srun", "-N", "1", "-n", "2", f"--mpi={mpi}")
    output = run([*srun, SCRIPT[0], "-c", JOIN], clean_environment(**cluster.variables))
    assert sorted(re.findall(r"worker (\d) of 2", output)) == ["0", "1"], output


@exhaustive
def test_two_components_of_a_job_are_refused(cluster):
    srun = cluster.inside("srun", "-n", "1", SCRIPT[0], "-c", JOIN)
    command = [*srun, ":", "-n", "1", SCRIPT[0], "-c", JOIN]
    with pytest.raises(AssertionError, match="heterogeneous job of Slurm"):
        run(command, clean_environment(**cluster.variables))


TRAIN = """
import os, pathlib, subprocess, sys, time
import keras, numpy, tfdist
from tfdist._src.keras.fit.step_exchange import Request, step_exchange
folder, what = pathlib.Path(sys.argv[1]), sys.argv[2]
interrupts = what == "interrupted" and "SLURM_RESTART_COUNT" not in os.environ

class Interrupt(keras.callbacks.Callback):
    steps = 0
    def on_train_batch_end(self, batch, logs=None):
        self.steps += 1
        if interrupts and self.steps == 12 and tfdist.rank() == 1:
            job = os.environ["SLURM_JOB_ID"]
            subprocess.run(["scancel", "--signal=TERM", job], check=True)  # as before the limit
            while not Request.SAVE_AND_EXIT in step_exchange.wanted:
                time.sleep(0.01)

keras.utils.set_random_seed(1)
with tfdist.MultiWorkerMirroredStrategy().scope():
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(16, "relu"),
                              keras.layers.Dropout(0.2, seed=3), keras.layers.Dense(1)])
    model.compile("adam", "mse")
x = numpy.random.default_rng(0).normal(size=(640, 8)).astype("float32")
backup = tfdist.callbacks.BackupAndRestore(folder / "snapshots", save_every=500)
model.fit(x, x.sum(1), batch_size=32, epochs=30, verbose=0, callbacks=[Interrupt(), backup])
weights = numpy.concatenate([w.numpy().ravel() for w in model.weights])
print(f"weights {weights.astype('float64').sum():.12f} of worker {tfdist.rank()}", flush=True)
"""


@exhaustive
@pytest.mark.timeout(600)
def test_a_job_that_is_preempted_goes_on(cluster, tmp_path):
    """The example puts it back into the queue, and it ends as one that was not preempted."""
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    found = []
    for what in ("undisturbed", "interrupted"):
        output = tmp_path / f"{what}.log"
        folder = tmp_path / what
        folder.mkdir()
        path = f"PATH={SCRIPT[0].rpartition('/')[0]}:{os.environ['PATH']}"
        options = ["--time=10", f"--output={output}", "--parsable", f"--chdir={ROOT}"]
        example = str(ROOT / "examples" / "train.sbatch")
        submit = ["env", path, "sbatch", *options, example, str(script), str(folder), what]
        environment = clean_environment(**cluster.variables)
        number = run(cluster.inside(*submit), environment).strip()
        state = ""
        while state not in ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT"):
            time.sleep(1.0)
            shown = cluster.run("scontrol", "show", "job", number)
            state = re.search(r"JobState=(\w+)", shown).group(1)
        text = output.read_text()
        assert state == "COMPLETED", text
        found.append(sorted(set(re.findall("weights .*", text))))
    assert len(found[0]) == 2 and found[0] == found[1], text
    assert "goes back into the queue" in text
    assert "training resumes at epoch" in text
