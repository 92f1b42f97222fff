"""mpirun of Open MPI and of MPICH."""

import os
import re

import pytest

from tests.engines.conftest import SCRIPT, clean_environment, needs, run
from tests.harness.tiers import exhaustive

OPEN_MPI = ["mpirun.openmpi", "--oversubscribe"]
if os.geteuid() == 0:
    OPEN_MPI.append("--allow-run-as-root")
PLACE = "import tfdist; print(f'worker {tfdist.rank()} of {tfdist.size()}')"


@exhaustive
def test_open_mpi_trains_as_one_process(train):
    needs(OPEN_MPI[0], package="openmpi-bin")
    train([*OPEN_MPI, "-n", "2"])


@exhaustive
def test_open_mpi_with_a_master(train):
    needs(OPEN_MPI[0], package="openmpi-bin")
    train([*OPEN_MPI, "-n", "2"], MASTER_ADDR="127.0.0.1", MASTER_PORT="29517")


@exhaustive
def test_mpich_trains_as_one_process(train):
    needs("mpirun.mpich", package="mpich")
    train(["mpirun.mpich", "-n", "2"])


@exhaustive
@pytest.mark.parametrize("mpirun", [OPEN_MPI, ["mpirun.mpich"]], ids=["Open MPI", "MPICH"])
def test_places_are_known_before_the_workers_meet(mpirun):
    needs(mpirun[0], package="openmpi-bin, mpich")
    output = run([*mpirun, "-n", "3", SCRIPT[0], "-c", PLACE], clean_environment())
    # The launcher may join the lines of several processes.
    assert sorted(re.findall(r"worker (\d) of 3", output)) == ["0", "1", "2"], output


@exhaustive
@pytest.mark.parametrize("mpirun", [OPEN_MPI, ["mpirun.mpich"]], ids=["Open MPI", "MPICH"])
def test_one_process_trains_alone(mpirun):
    needs(mpirun[0], package="openmpi-bin, mpich")
    program = "import tfdist; print(tfdist.MultiWorkerMirroredStrategy().num_replicas_in_sync)"
    output = run([*mpirun, "-n", "1", SCRIPT[0], "-c", program], clean_environment())
    assert output.strip().splitlines()[-1] == "1"
