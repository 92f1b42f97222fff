"""The cores, memory and GPUs of this host that this process may use."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from tfdist._src.launch.commands.doctor.section import Context, Section
from tfdist._src.launch.job.cores import available_cores
from tfdist._src.launch.job.gpus import visible_gpus

_GIB = 1 << 30
_SHARED_MEMORY = "/dev/shm"
# The limit of a container: cgroup version 2, then 1.
_MEMORY_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def check(context: Context) -> Section:
    """Counts the resources."""
    section = Section()
    section.add("cores", f"{available_cores()} of {os.cpu_count()}")
    section.add("memory", _memory())
    if os.path.isdir(_SHARED_MEMORY):
        free = shutil.disk_usage(_SHARED_MEMORY).free
        section.add("shared memory", f"{free / _GIB:.1f} GiB free in {_SHARED_MEMORY}")
    gpus = visible_gpus(context.environment)
    section.add("GPUs", ", ".join(gpus) if gpus else "none visible")
    return section


def _memory() -> str:
    """Total and free memory, and the limit of a container."""
    try:
        fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        total, free = (int(fields[name].split()[0]) << 10 for name in ("MemTotal", "MemAvailable"))
    except (OSError, KeyError, ValueError):
        return "unknown"
    text = f"{total / _GIB:.1f} GiB, {free / _GIB:.1f} GiB available"
    for path in _MEMORY_LIMITS:
        try:
            limit = int(Path(path).read_text())
        except (OSError, ValueError):
            continue
        if limit < total:
            text += f", limited to {limit / _GIB:.1f} GiB"
    return text
