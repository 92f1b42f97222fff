"""srun and sbatch on a cluster of two nodes."""

import re

import pytest

from tests.engines.conftest import SCRIPT, clean_environment, run
from tests.engines.slurm_cluster import slurm_cluster
from tests.tiers import exhaustive

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
def test_srun(cluster, train):
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
def test_one_node(cluster, mpi):
    srun = cluster.inside("srun", "-N", "1", "-n", "2", f"--mpi={mpi}")
    output = run([*srun, SCRIPT[0], "-c", JOIN], clean_environment(**cluster.variables))
    assert sorted(re.findall(r"worker (\d) of 2", output)) == ["0", "1"], output


@exhaustive
def test_two_components_of_a_job_are_refused(cluster):
    srun = cluster.inside("srun", "-n", "1", SCRIPT[0], "-c", JOIN)
    command = [*srun, ":", "-n", "1", SCRIPT[0], "-c", JOIN]
    with pytest.raises(AssertionError, match="heterogeneous job of Slurm"):
        run(command, clean_environment(**cluster.variables))
