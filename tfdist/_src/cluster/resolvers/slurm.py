"""Slurm: the tasks of a step that `srun` has started.

Rank 0 runs on the first host in the host list of the step, regardless of how Slurm distributes the
tasks. The port of rank 0 is computed from the number of the job and the number of the step. The
workers connect to rank 0 to exchange their addresses.

MUNGE is the authentication service of Slurm clusters. Rank 0 uses MUNGE to encrypt the job's secret
in a credential. Only processes of the same user can decrypt the credential, and only on hosts with
the MUNGE key of the cluster. They also learn from the credential which user has created it.
"""

import itertools
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping

from tfdist._src.cluster.resolvers import found
from tfdist._src.cluster.resolvers.torchrun import master
from tfdist.errors import ClusterError

_MAX_HOSTS = 1 << 20
_PART = re.compile(r"\[([^\[\]]*)\]|([^\[\]]+)")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")


def expand(text: str, variable: str) -> list[str]:
    """Converts a Slurm host list to the names of the hosts, in the same order.

    Args:
        text: the host list. Brackets contain numbers and ranges of numbers. Leading zeros are part
            of the host name.
        variable: the name of the environment variable with the host list, for error messages.

    Raises:
        ClusterError: the host list is malformed.

    Example:
        >>> expand("a[08-10,2]x[1-2],b", "LIST")
        ['a08x1', 'a08x2', 'a09x1', 'a09x2', 'a10x1', 'a10x2', 'a2x1', 'a2x2', 'b']
    """
    try:
        hosts = list(itertools.islice(_hosts(text), _MAX_HOSTS))
    except ValueError:
        hosts = []
    if not hosts:
        raise ClusterError(
            f"{variable} is not a list of hosts such as 'gpu[01-03],login'. Received: "
            f"{text[:200]!r}. Let srun set it, or set TF_CONFIG."
        )
    return hosts


def _hosts(text: str) -> Iterator[str]:
    for entry in re.split(r",(?![^\[]*\])", text.strip()):
        parts = list(_PART.finditer(entry))
        if not entry or "".join(part[0] for part in parts) != entry:
            raise ValueError(entry)
        choices = [[part[2]] if part[2] else _numbers(part[1]) for part in parts]
        yield from map("".join, itertools.product(*choices))


def _numbers(text: str) -> list[str]:
    numbers: list[str] = []
    for entry in text.split(","):
        match = _RANGE.fullmatch(entry)
        if match is None:
            raise ValueError(entry)
        first, last = match[1], match[2] or match[1]
        if not 0 <= int(last) - int(first) < _MAX_HOSTS:
            raise ValueError(entry)
        numbers += [str(n).zfill(len(first)) for n in range(int(first), int(last) + 1)]
    return numbers


_SECONDS = 30.0


def seal(secret: str) -> str:
    """Encrypts a secret in a credential that only processes of this user can decrypt.

    Raises:
        ClusterError: MUNGE does not work on this host.
    """
    return _run(["munge", f"--restrict-uid={os.getuid()}"], secret)


def unseal(credential: str) -> str:
    """Decrypts a credential and returns the secret.

    Raises:
        ClusterError: MUNGE does not work on this host, or another user has created the credential.
    """
    with tempfile.NamedTemporaryFile("r") as metadata:
        secret = _run(["unmunge", f"--metadata={metadata.name}", "--keys=UID"], credential)
        uid = metadata.read().rpartition("(")[2].partition(")")[0]
    if uid != str(os.getuid()):
        raise ClusterError(
            f"The process that answers as rank 0 belongs to another user. Received: user id {uid}. "
            "Set MASTER_PORT to another port for all workers."
        )
    return secret


def _run(command: list[str], text: str) -> str:
    try:
        done = subprocess.run(
            command, input=text, capture_output=True, text=True, timeout=_SECONDS, check=False
        )
        problem = done.stderr.strip() if done.returncode else ""
    except (OSError, subprocess.SubprocessError) as error:
        problem = str(error)
    if problem:
        raise ClusterError(
            f"MUNGE does not work on this host: {problem.splitlines()[0]}. Start munged, or export "
            "TFDIST_SECRET before srun."
        )
    return done.stdout


_RANK, _SIZE = "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"
_FIRST_PORT, _PORTS = 12000, 20000
"""Below the ports that operating systems use for outgoing connections."""

_INNER = ("OMPI_COMM_WORLD_SIZE", "HYDI_CONTROL_FD", "TORCHELASTIC_RUN_ID")
"""Variables that launchers inside a Slurm step set. Their processes are not tasks of srun."""


def resolve(environ: Mapping[str, str]) -> found.ResolvedJob | None:
    """Returns the job of this process if it is a task of a Slurm step; otherwise None.

    Raises:
        ClusterError: the variables contradict each other, or the step is heterogeneous.
    """
    if not environ.get("SLURM_STEP_ID", "").isdecimal() or any(map(environ.get, _INNER)):
        return None
    if environ.get("SLURM_HET_SIZE", "1") != "1":
        raise ClusterError(
            "A heterogeneous job of Slurm has no list of all its hosts. Received: SLURM_HET_SIZE="
            f"{environ['SLURM_HET_SIZE']}. Submit a job of one component, or set TF_CONFIG."
        )
    rank, size = found.rank_and_size(environ, _RANK, _SIZE)
    for mine, theirs, value in (("RANK", _RANK, rank), ("WORLD_SIZE", _SIZE, size)):
        if environ.get(mine, str(value)) != str(value):
            raise ClusterError(
                f"{mine} and {theirs} contradict each other. Received: {mine}={environ[mine]}, "
                f"{theirs}={value}. Unset {mine}, since srun sets {theirs} for each task, or start "
                "the matching number of tasks."
            )
    if size == 1:
        return found.ResolvedJob("Slurm")
    hosts = expand(environ.get("SLURM_STEP_NODELIST", ""), "SLURM_STEP_NODELIST")
    job, step = found.number(environ, "SLURM_JOB_ID"), found.number(environ, "SLURM_STEP_ID")
    exchange = found.AddressExchange(
        meeting=master(environ, hosts[0], _FIRST_PORT + (31 * job + step) % _PORTS),
        seals=shutil.which("munge") is not None,
        one_host=len(hosts) == 1,
    )
    return found.numbered("Slurm", rank, size, exchange)
