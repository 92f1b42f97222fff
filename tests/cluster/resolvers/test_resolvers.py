"""What the environment tells of a job: one table, and its contradictions."""

from __future__ import annotations

import pytest

from tests.harness.tiers import exhaustive
from tfdist._src.cluster.resolvers.registry import RESOLVERS, find
from tfdist._src.cluster.resolvers.slurm import expand
from tfdist.errors import ClusterError

SLURM = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "1",
    "SLURM_PROCID": "2",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
    "SLURM_NTASKS": "8",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
MPICH = {"PMI_RANK": "0", "PMI_SIZE": "2", "PMI_FD": "9", "HYDI_CONTROL_FD": "7"}
TORCHRUN = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "4000"}
POD = {
    "JOB_COMPLETION_INDEX": "1",
    "HOSTNAME": "train-1",
    "TFDIST_WORKERS": "2",
    "TFDIST_SERVICE": "workers",
    "KUBERNETES_SERVICE_HOST": "10.96.0.1",
}
SAGEMAKER = {"SM_HOSTS": '["algo-1", "algo-2"]', "SM_CURRENT_HOST": "algo-2"}
TF_CONFIG = {
    "TF_CONFIG": '{"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 0}}'
}

FOUND = [
    # environment, engine, rank, size, rank 0's address
    ({}, "", 0, 1, None),
    (SLURM, "Slurm", 2, 3, "gpu07:12218"),
    ({**SLURM, "MASTER_ADDR": "gpu07-ib", "MASTER_PORT": "5000"}, "Slurm", 2, 3, "gpu07-ib:5000"),
    ({**SLURM, "MASTER_ADDR": "fd00::1"}, "Slurm", 2, 3, "[fd00::1]:12218"),
    ({**SLURM, "RANK": "2", "WORLD_SIZE": "3"}, "Slurm", 2, 3, "gpu07:12218"),
    ({**SLURM, "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}, "Slurm", 0, 1, None),
    ({**SLURM, "SLURM_STEP_ID": ""}, "", 0, 1, None),  # a batch script
    (OPEN_MPI, "Open MPI", 1, 4, ""),
    ({**OPEN_MPI, "MASTER_ADDR": "h"}, "Open MPI", 1, 4, "h:29500"),
    (MPICH, "MPICH", 0, 2, ""),
    (TORCHRUN, "torchrun", 1, 2, "10.0.0.1:4000"),
    ({**TORCHRUN, "MASTER_ADDR": "fd00::1"}, "torchrun", 1, 2, "[fd00::1]:4000"),
    ({**TORCHRUN, "TORCHELASTIC_USE_AGENT_STORE": "True"}, "torchrun", 1, 2, "10.0.0.1:4001"),
    ({"RANK": "0", "WORLD_SIZE": "1"}, "torchrun", 0, 1, None),
    (POD, "Kubernetes", 1, 2, "train-0.workers:2222"),
    ({**POD, "HOSTNAME": "set-pods-0-1.x.svc"}, "Kubernetes", 1, 2, "set-pods-0-0.workers:2222"),
    (
        {**POD, "TFDIST_ELASTIC": "1", "JOB_COMPLETION_INDEX": "4", "HOSTNAME": "train-4"},
        "Kubernetes",
        4,
        5,
        None,
    ),  # given to a job of fewer, which takes it in
    ({"JOB_COMPLETION_INDEX": "3"}, "", 0, 1, None),  # pods that do not work together
    (SAGEMAKER, "SageMaker", 1, 2, "algo-1:2222"),
    ({**SAGEMAKER, "SM_HOSTS": '["algo-2"]'}, "SageMaker", 0, 1, None),
    (TF_CONFIG, "TF_CONFIG", 0, 2, "a:1"),
    # What was started last counts.
    ({**SLURM, **TF_CONFIG}, "TF_CONFIG", 0, 2, "a:1"),
    ({**SLURM, **OPEN_MPI}, "Open MPI", 1, 4, ""),
    ({**SLURM, **MPICH}, "MPICH", 0, 2, ""),
    ({**SLURM, "PMI_RANK": "2", "PMI_SIZE": "3", "SLURM_MPI_TYPE": "pmi2"}, "Slurm", 2, 3, None),
    ({**SLURM, **TORCHRUN, "TORCHELASTIC_RUN_ID": "x"}, "torchrun", 1, 2, "10.0.0.1:4000"),
    ({**POD, **OPEN_MPI}, "Open MPI", 1, 4, ""),
]

WRONG = [
    # environment, what the error says
    ({**SLURM, "SLURM_PROCID": "3"}, "SLURM_PROCID and SLURM_STEP_NUM_TASKS contradict each other"),
    ({**SLURM, "SLURM_PROCID": ""}, "SLURM_PROCID must be an integer >= 0. Received: ''"),
    ({**SLURM, "SLURM_STEP_NODELIST": "gpu[7"}, "SLURM_STEP_NODELIST is not a list of hosts"),
    ({**SLURM, "SLURM_HET_SIZE": "2"}, "heterogeneous job"),
    ({**SLURM, "WORLD_SIZE": "4"}, "WORLD_SIZE and SLURM_STEP_NUM_TASKS contradict each other"),
    ({**SLURM, "RANK": "0"}, "RANK and SLURM_PROCID contradict each other"),
    ({**OPEN_MPI, "OMPI_COMM_WORLD_RANK": "4"}, "OMPI_COMM_WORLD_SIZE contradict each other"),
    ({"OMPI_COMM_WORLD_SIZE": "2"}, "OMPI_COMM_WORLD_RANK is not set"),
    ({**MPICH, "PMI_RANK": "x"}, "PMI_RANK must be an integer"),
    ({"RANK": "0"}, "WORLD_SIZE is not set"),
    ({"WORLD_SIZE": "2"}, "RANK is not set"),
    ({**TORCHRUN, "MASTER_ADDR": ""}, "but not MASTER_ADDR"),
    ({**TORCHRUN, "MASTER_PORT": "http"}, "MASTER_PORT must be an integer"),
    ({**TORCHRUN, "RANK": "2"}, "RANK and WORLD_SIZE contradict each other"),
    ({**POD, "HOSTNAME": "train-0"}, "does not end with its index"),
    ({**POD, "TFDIST_SERVICE": ""}, "TFDIST_SERVICE is not set"),
    ({**POD, "TFDIST_WORKERS": "1"}, "JOB_COMPLETION_INDEX and TFDIST_WORKERS contradict"),
    ({**SAGEMAKER, "SM_CURRENT_HOST": "algo-3"}, "SM_CURRENT_HOST and SM_HOSTS contradict"),
    ({**SAGEMAKER, "SM_HOSTS": "algo-1"}, "SM_HOSTS must be a JSON list"),
    ({"TF_CONFIG": "{"}, "TF_CONFIG is not JSON"),
]


def test_what_is_found():
    for environ, engine, rank, size, chief in FOUND:
        found = find(environ)
        case = f"{environ}: {found}"
        assert (found.engine, found.topology.rank, found.topology.size) == (engine, rank, size), (
            case
        )
        if chief is not None:
            assert found.topology.chief.address == chief, case
        assert found.late_names == ("KUBERNETES_SERVICE_HOST" in environ and engine != ""), case
    assert {engine for _, engine, *_ in FOUND} == {"", *RESOLVERS}


def test_contradictions_in_the_environment_are_refused():
    for environ, said in WRONG:
        with pytest.raises(ClusterError) as caught:
            find(environ)
        message = str(caught.value)
        assert said in message, environ
        assert "\n" not in message and message.endswith("."), message


@exhaustive
def test_all_ranks_of_an_engine_describe_the_same_job():
    for environ, name in ((SLURM, "SLURM_PROCID"), (TORCHRUN, "RANK"), (POD, "")):
        size = find(environ).topology.size
        prints = set()
        for rank in range(size):
            place = {name: str(rank)}
            if not name:
                place = {"JOB_COMPLETION_INDEX": str(rank), "HOSTNAME": f"train-{rank}"}
            topology = find({**environ, **place}).topology
            assert topology.rank == rank
            prints.add(topology.fingerprint())
        assert len(prints) == 1, environ


@exhaustive
def test_lists_of_hosts():
    for text, hosts in {
        "a": ["a"],
        "a,b-1.c": ["a", "b-1.c"],
        "n[1-3]": ["n1", "n2", "n3"],
        "n[1-2,07-10,3],m": ["n1", "n2", "n07", "n08", "n09", "n10", "n3", "m"],
        "r[1-2]n[0-1]-ib": ["r1n0-ib", "r1n1-ib", "r2n0-ib", "r2n1-ib"],
        "[4-5]": ["4", "5"],
        "n[098-101]": ["n098", "n099", "n100", "n101"],
    }.items():
        assert expand(text, "LIST") == hosts
    for text in ("", ",", "a,,b", "n[1", "n1]", "n[]", "n[a]", "n[3-1]", "n[1-]", "n[1-99999999]"):
        with pytest.raises(ClusterError, match="LIST is not a list of hosts"):
            expand(text, "LIST")
