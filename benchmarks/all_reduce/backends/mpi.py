"""The backend `mpi`: Open MPI."""

from __future__ import annotations

import shutil
import subprocess

from benchmarks.all_reduce.compiling import RANKS, build
from benchmarks.all_reduce.job import Job, MissingError, Process
from benchmarks.all_reduce.remote import write_agent

AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
INSTALL = "apt-get install openmpi-bin libopenmpi-dev"


def mpi(job: Job) -> list[Process]:
    """Returns the process to start: `mpirun`, which starts all ranks."""
    mpirun, mpicc = find()
    program = build(mpicc, [RANKS / "mpi.c"], job.builds / "mpi")
    command = launcher(mpirun, job.ranks)
    if job.hosts.namespaces:
        hosts = [job.hosts.addresses[host] for host in job.host_of_rank]
        agent = write_agent(job.folder / "agent", job.hosts)
        command += ["--host", ",".join(hosts), "--mca", "plm_rsh_agent", str(agent)]
        for layer in ("btl_tcp", "oob_tcp"):
            command += ["--mca", f"{layer}_if_include", job.hosts.interface]
    return [Process([*command, str(program), str(job.control), str(int(job.in_place))], 0, AS_ROOT)]


def launcher(mpirun: str, ranks: int) -> list[str]:
    """Returns the `mpirun` command that starts ranks, without the program to run.

    The ranks are not pinned to cores. There may be more ranks than cores.
    """
    return [mpirun, "--oversubscribe", "--bind-to", "none", "-n", str(ranks)]


def find() -> tuple[str, str]:
    """Returns the paths of Open MPI's commands `mpirun` and `mpicc`.

    Raises:
        MissingError: a command is not installed, or `mpirun` belongs to another MPI implementation.
    """
    # If several MPI implementations are installed, Debian names the commands `mpirun.openmpi` and
    # so on.
    found = [shutil.which(f"{c}.openmpi") or shutil.which(c) for c in ("mpirun", "mpicc")]
    if not all(found):
        raise MissingError(f"there is no mpirun with mpicc; {INSTALL}")
    version = subprocess.run([found[0], "--version"], capture_output=True, text=True).stdout
    if "open-mpi.org" not in version:
        raise MissingError(f"{found[0]} is not Open MPI's; {INSTALL}")
    return found[0], found[1]
