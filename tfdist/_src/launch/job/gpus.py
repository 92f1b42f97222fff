"""The GPUs of this host, and their division among its workers."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from tfdist.errors import LaunchError

VISIBLE = "CUDA_VISIBLE_DEVICES"


def visible_gpus(environment: Mapping[str, str], devices: Path = Path("/dev")) -> list[str]:
    """The GPUs visible to a program started here.

    Args:
        environment: may contain `CUDA_VISIBLE_DEVICES`; without it, all GPUs are visible.
        devices: the directory with the `nvidia0`, `nvidia1`, … device files.

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
            break  # Like CUDA, ignore everything after an invalid entry.
        gpus.append(name)
    return gpus


def gpu_settings(
    gpus: Sequence[str], workers: int, per_worker: int | None
) -> tuple[list[dict[str, str]], str]:
    """Divides the GPUs among the workers of this host.

    All workers of a job must use the same kind of device, so with fewer GPUs than workers all of
    them use the CPU.

    Args:
        gpus: the visible GPUs.
        workers: the number of workers on this host.
        per_worker: GPUs per worker if set by the user; None divides them evenly.

    Returns:
        The variables to add to each worker's environment, and a note for the user ("" if none).

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
