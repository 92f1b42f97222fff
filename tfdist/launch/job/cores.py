"""The CPU cores of this process, and the thread settings that share them among workers."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path

# TensorFlow runs a blocked collective on an inter-op thread: with one thread it would block
# the very op its peers wait for.
_LEAST_INTEROP_THREADS = 2


def available_cores() -> int:
    """The cores this process may use: its affinity mask, and the CPU quota of its cgroup.

    Returns:
        A count, at least 1. A quota of 2.5 cores counts as 2.

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
    root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")
) -> float | None:
    """The tightest CPU quota on the way from this process's cgroup up to the root.

    Args:
        root: where the cgroup file system is mounted.
        own: the file that names this process's cgroups.

    Returns:
        A number of cores, or None where there is no quota.
    """
    try:
        lines = own.read_text().splitlines()
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
    """The variables that give each worker of this machine its share of the cores.

    Args:
        cores: the cores to share.
        workers: the workers on this machine.
        per_worker: cores for each worker as the user asked; 0 leaves the threads alone, None
            shares evenly and keeps what the user has set in `environment`.
        environment: what the workers inherit.

    Returns:
        What to add to each worker's environment.

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
        "TF_NUM_INTEROP_THREADS": str(max(_LEAST_INTEROP_THREADS, share)),
    }
    if per_worker is not None:
        return settings
    return {name: value for name, value in settings.items() if not environment.get(name)}


def _quotas(mount: Path, path: str, read: Callable[[Path], float]) -> list[float]:
    """The quotas of the cgroup `path` and of those above it, as far as they can be read."""
    found = []
    directory = mount / path.lstrip("/")
    for level in (directory, *directory.parents):
        try:
            found.append(read(level))
        except (OSError, ValueError, ZeroDivisionError):
            pass  # No such file at this level, or "max": no quota here.
        if level == mount:
            break
    return [quota for quota in found if quota > 0]


def _quota_v2(level: Path) -> float:
    quota, period = (level / "cpu.max").read_text().split()
    return int(quota) / int(period)


def _quota_v1(level: Path) -> float:
    quota = (level / "cpu.cfs_quota_us").read_text()
    return int(quota) / int((level / "cpu.cfs_period_us").read_text())
