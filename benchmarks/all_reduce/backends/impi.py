"""Intel MPI, from pip."""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks.all_reduce.compiling import RANKS, build
from benchmarks.all_reduce.job import Job, MissingError, Process
from benchmarks.all_reduce.remote import write_agent

PARTS = ("bin/mpiexec.hydra", "lib/libmpi.so", "include/mpi.h")


def impi(job: Job) -> list[Process]:
    """One `mpiexec` for all ranks."""
    root = find(job)
    library = root / "lib"
    program = build(
        "gcc", [RANKS / "mpi.c"], job.builds / "impi",
        f"-I{root / 'include'}", f"-L{library}", "-lmpi", f"-Wl,-rpath,{library}",
    )  # fmt: skip
    env = {
        "I_MPI_ROOT": str(root),
        "LD_LIBRARY_PATH": str(library),
        "I_MPI_FABRICS": "shm",
        "I_MPI_PIN": "off",  # As the ranks of every other backend.
    }
    command = [str(root / PARTS[0]), "-n", str(job.ranks)]
    if job.hosts.namespaces:
        hosts = [job.hosts.addresses[host] for host in job.host_of_rank]
        machines = job.folder / "machines"
        machines.write_text("".join(f"{h}:{hosts.count(h)}\n" for h in dict.fromkeys(hosts)))
        agent = write_agent(job.folder / "agent", job.hosts)
        command += ["-machinefile", str(machines), "-launcher", "ssh"]
        command += ["-launcher-exec", str(agent), "-iface", job.hosts.interface]
        env |= {
            "I_MPI_FABRICS": "shm:ofi",
            "I_MPI_OFI_PROVIDER": "tcp",
            "FI_PROVIDER_PATH": str(library),
            "FI_TCP_IFACE": job.hosts.interface,
        }
    return [Process([*command, str(program), str(job.control), str(int(job.in_place))], 0, env)]


def find(job: Job) -> Path:
    """The folder of Intel MPI: the one named, or this Python's, or torch's Python's.

    Raises:
        MissingError: it lies in none.
    """
    if job.impi_root:
        roots = [Path(job.impi_root)]
    else:
        # A virtual environment's interpreter is a link to another's, so it is not resolved.
        roots = [Path(sys.prefix), Path(job.torch_python).absolute().parent.parent]
    for root in roots:
        if all((root / part).exists() for part in PARTS):
            return root
    raise MissingError(
        f"{' and '.join(dict.fromkeys(map(str, roots)))} lack {', '.join(PARTS)}; "
        "pip install impi-rt impi-devel, or name its folder by --impi_root"
    )
