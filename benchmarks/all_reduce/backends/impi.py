"""The backend `impi`: Intel MPI, which can be installed with pip."""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks.all_reduce.compiling import RANKS, build
from benchmarks.all_reduce.job import Job, MissingError, Process
from benchmarks.all_reduce.remote import write_agent

PARTS = ("bin/mpiexec.hydra", "lib/libmpi.so", "include/mpi.h")


def impi(job: Job) -> list[Process]:
    """Returns the process to start: `mpiexec`, which starts all ranks."""
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
        "I_MPI_PIN": "off",  # The other backends do not pin their ranks to cores either.
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
    """Returns the folder of Intel MPI.

    If `job.impi_root` is empty, searches the environments of this Python and of `torch_python`.

    Raises:
        MissingError: Intel MPI is not in these folders.
    """
    if job.impi_root:
        roots = [Path(job.impi_root)]
    else:
        # In a virtual environment, `bin/python` is a link to an interpreter outside of the
        # environment. So the link must not be resolved.
        roots = [Path(sys.prefix), Path(job.torch_python).absolute().parent.parent]
    for root in roots:
        if all((root / part).exists() for part in PARTS):
            return root
    raise MissingError(
        f"{' and '.join(dict.fromkeys(map(str, roots)))} lack {', '.join(PARTS)}; "
        "pip install impi-rt impi-devel, or name its folder by --impi_root"
    )
