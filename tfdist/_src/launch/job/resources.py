"""Counts the cores and GPUs of this host, and divides them among its workers."""

import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from tfdist.errors import LaunchError

# A collective that waits for other workers occupies an inter-op thread. With only one thread, the
# operation for which the other workers wait could never run.
_MIN_INTEROP_THREADS = 2


def available_cores() -> int:
    """Returns the number of cores that this process may use.

    The CPU affinity mask of the process and the CPU quota of its cgroup limit the number.

    Returns:
        The number of cores, at least 1. A quota of 2.5 cores counts as 2 cores.

    Example:
        >>> available_cores() >= 1
        True
    """
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    quota = cgroup_quota()
    return cores if quota is None else max(1, min(cores, int(quota)))


def cgroup_quota(
    root: Path = Path("/sys/fs/cgroup"), cgroups: Path = Path("/proc/self/cgroup")
) -> float | None:
    """Returns the CPU quota of this process.

    The quota is the lowest among the quotas of the process's cgroup and of all cgroups above it.

    Args:
        root: the mount point of the cgroup file system.
        cgroups: the file that lists the cgroups of this process.

    Returns:
        The quota as a number of cores; None if there is no quota.
    """
    try:
        lines = cgroups.read_text().splitlines()
    except OSError:
        return None
    quotas = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            quotas += _quotas(root, path, _quota_v2)
        elif "cpu" in controllers.split(","):
            quotas += _quotas(root / "cpu", path, _quota_v1)
    return min(quotas, default=None)


def thread_settings(
    cores: int, workers: int, per_worker: int | None, environment: Mapping[str, str]
) -> dict[str, str]:
    """Returns environment variables that limit each worker's threads to its share of the cores.

    Args:
        cores: the number of cores of this host.
        workers: the number of workers on this host.
        per_worker: the number of cores for each worker, if the user has set it. If it is 0, the
            numbers of threads are not configured. If it is None, the cores are divided evenly, and
            variables that are already set in `environment` keep their values.
        environment: the environment that the workers inherit.

    Returns:
        The environment variables to add for each worker.

    Example:
        >>> thread_settings(8, 4, None, {"OMP_NUM_THREADS": "1"})
        {'TF_NUM_INTRAOP_THREADS': '2', 'TF_NUM_INTEROP_THREADS': '2'}
    """
    if per_worker == 0:
        return {}
    share = max(1, cores // workers) if per_worker is None else per_worker
    settings = {
        "OMP_NUM_THREADS": str(share),
        "TF_NUM_INTRAOP_THREADS": str(share),
        "TF_NUM_INTEROP_THREADS": str(max(_MIN_INTEROP_THREADS, share)),
    }
    if per_worker is not None:
        return settings
    return {name: value for name, value in settings.items() if not environment.get(name)}


def _quotas(mount: Path, path: str, read: Callable[[Path], float]) -> list[float]:
    """Returns the quotas of the cgroup at `path` and of all cgroups above it, if they have one."""
    found = []
    directory = mount / path.lstrip("/")
    for level in (directory, *directory.parents):
        try:
            found.append(read(level))
        except (OSError, ValueError, ZeroDivisionError):
            pass  # This cgroup has no quota: it has no such file, or the quota is "max".
        if level == mount:
            break
    return [quota for quota in found if quota > 0]


def _quota_v2(level: Path) -> float:
    quota, period = (level / "cpu.max").read_text().split()
    return int(quota) / int(period)


def _quota_v1(level: Path) -> float:
    quota = (level / "cpu.cfs_quota_us").read_text()
    return int(quota) / int((level / "cpu.cfs_period_us").read_text())


VISIBLE = "CUDA_VISIBLE_DEVICES"


def visible_gpus(environment: Mapping[str, str], devices: Path = Path("/dev")) -> list[str]:
    """Returns the GPUs of this host that are visible to a program with the given environment.

    Args:
        environment: the environment variables. If `CUDA_VISIBLE_DEVICES` is not among them, all
            GPUs are visible.
        devices: the directory that contains the device files `nvidia0`, `nvidia1`, …

    Returns:
        The `CUDA_VISIBLE_DEVICES` entry of each GPU: an index or a UUID.

    Example:
        >>> visible_gpus({"CUDA_VISIBLE_DEVICES": "2,3"})
        ['2', '3']
    """
    listed = environment.get(VISIBLE)
    if listed is None:
        files = [path for path in devices.glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name)]
        return [str(index) for index in range(len(files))]
    gpus = []
    for name in (part.strip() for part in listed.split(",")):
        if name in ("", "-1"):
            break  # Ignore this invalid entry and all entries after it, as CUDA does.
        gpus.append(name)
    return gpus


def gpu_settings(
    gpus: Sequence[str], workers: int, per_worker: int | None
) -> tuple[list[dict[str, str]], str]:
    """Divides the GPUs among the workers of this host.

    All workers of a job must use the same kind of device. Therefore, if there are fewer GPUs than
    workers, all workers use the CPU.

    Args:
        gpus: the visible GPUs.
        workers: the number of workers on this host.
        per_worker: the number of GPUs for each worker, if the user has set it. If it is None, the
            GPUs are divided evenly.

    Returns:
        For each worker, the environment variables to add; and a note for the user, "" if there is
        nothing to note.

    Raises:
        LaunchError: this host has fewer GPUs than requested.

    Example:
        >>> gpu_settings(["0", "1"], 2, None)
        ([{'CUDA_VISIBLE_DEVICES': '0'}, {'CUDA_VISIBLE_DEVICES': '1'}], '')
    """
    if per_worker is None and (not gpus or workers == 1):
        return [{} for _ in range(workers)], ""
    note = ""
    if per_worker is None:
        each = len(gpus) // workers
        if each == 0:
            note = (
                f"{_count(len(gpus))} for {workers} workers: all workers use the CPU, because the "
                f"workers of a job must use the same kind of device. Pass -n {len(gpus)} to use "
                f"the GPUs."
            )
        elif unused := len(gpus) - each * workers:
            note = f"{_count(unused)} of {len(gpus)} left unused: each worker gets {each}."
    else:
        each = per_worker
        if each * workers > len(gpus):
            raise LaunchError(
                f"--gpus-per-worker {each} with {workers} workers needs {each * workers} GPUs. "
                f"Received: a host with {len(gpus)} visible. Lower it, or correct {VISIBLE}."
            )
    slices = [gpus[each * index : each * (index + 1)] for index in range(workers)]
    return [{VISIBLE: ",".join(part)} for part in slices], note


def _count(gpus: int) -> str:
    return f"{gpus} GPU" if gpus == 1 else f"{gpus} GPUs"
