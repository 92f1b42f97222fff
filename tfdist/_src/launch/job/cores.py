"""The CPU cores of this process, and the thread settings that divide them among workers."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path

# A blocked collective occupies an inter-op thread: with only one, it would block the very op that
# its peers wait for.
_MIN_INTEROP_THREADS = 2


def available_cores() -> int:
    """The number of cores this process may use, given its affinity mask and cgroup CPU quota.

    Returns:
        The number of cores, at least 1. A quota of 2.5 cores counts as 2.

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
    """The tightest CPU quota from this process's cgroup up to the root.

    Args:
        root: where the cgroup file system is mounted.
        cgroups: the file that lists this process's cgroups.

    Returns:
        A number of cores, or None without a quota.
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
    """The variables that limit each worker of this host to its share of the cores.

    Args:
        cores: the number of cores to divide.
        workers: the number of workers on this host.
        per_worker: cores per worker if set by the user; 0 leaves the threads unconfigured, None
            divides evenly and keeps variables already set in `environment`.
        environment: the environment that the workers inherit.

    Returns:
        The variables to add to each worker's environment.

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
    """The quotas of the cgroup `path` and its ancestors that can be read."""
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
