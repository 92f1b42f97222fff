"""The GPUs of this machine, and the slices of them that its workers get."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from tfdist.errors import LaunchError

VISIBLE = "CUDA_VISIBLE_DEVICES"


def visible_gpus(environment: Mapping[str, str], devices: Path = Path("/dev")) -> list[str]:
    """The GPUs that a program started here would see.

    Args:
        environment: where `CUDA_VISIBLE_DEVICES` is read; without it, all GPUs are visible.
        devices: the folder with the `nvidia0`, `nvidia1`, … device files.

    Returns:
        What to write into `CUDA_VISIBLE_DEVICES` for each one: an index or a UUID.

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
            break  # CUDA, too, ignores what follows an invalid entry.
        gpus.append(name)
    return gpus


def gpu_settings(
    gpus: Sequence[str], workers: int, per_worker: int | None
) -> tuple[list[dict[str, str]], str]:
    """Shares the GPUs out among the workers of this machine.

    Workers of one job must hold the same kind of device, so fewer GPUs than workers means that
    all of them run on the CPU.

    Args:
        gpus: the visible GPUs.
        workers: the workers on this machine.
        per_worker: GPUs for each worker as the user asked; None shares them evenly.

    Returns:
        What to add to each worker's environment, and a note for the user, "" for none.

    Raises:
        LaunchError: the machine has fewer GPUs than were asked for.

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
                f"{_count(len(gpus))} for {workers} workers: all of them use the CPU, as the "
                f"workers of a job need the same kind of device. Start -n {len(gpus)} to use "
                f"the GPUs."
            )
        elif unused := len(gpus) - each * workers:
            note = f"{_count(unused)} of {len(gpus)} left unused: each worker gets {each}."
    else:
        each = per_worker
        if each * workers > len(gpus):
            raise LaunchError(
                f"--gpus-per-worker {each} with {workers} workers needs {each * workers} GPUs. "
                f"Received: a machine with {len(gpus)} visible. Ask for fewer, or mend {VISIBLE}."
            )
    slices = [gpus[each * index : each * (index + 1)] for index in range(workers)]
    return [{VISIBLE: ",".join(part)} for part in slices], note


def _count(gpus: int) -> str:
    return f"{gpus} GPU" if gpus == 1 else f"{gpus} GPUs"
