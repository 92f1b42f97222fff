"""Finds the job that a process of this host belongs to, in the process's environment."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from tfdist._src.cluster.tf_config import from_tf_config
from tfdist.errors import ClusterError, LaunchError

_REMEDY = "pass a worker's process ID, that of `tfdist run`, or the address of rank 0, HOST:PORT"


def find_job(pid: int) -> tuple[str, dict[str, str]]:
    """The address of rank 0, and the environment of a worker on this host.

    Args:
        pid: the process ID of a worker, or of a process that has started some, as `tfdist run` has.

    Returns:
        `"host:port"`, and the variables that the worker was started with.

    Raises:
        LaunchError: there is no such process, it belongs to someone else, or it is in no job.
    """
    failure: LaunchError | None = None
    for process in _with_descendants(pid):
        try:
            environment = _environment(process)
            topology = from_tf_config(environment.get("TF_CONFIG"))
        except ClusterError as error:
            failure = failure or LaunchError(f"the environment of process {process}: {error}")
        except LaunchError as error:
            failure = failure or error
        else:
            if topology.size > 1:
                return topology.workers[0].address, environment
    raise failure or LaunchError(
        f"process {pid} was not started with a TF_CONFIG of several workers, nor were those that "
        f"it has started: {_REMEDY}."
    )


def _with_descendants(pid: int) -> Iterator[int]:
    """A process and those that it has started, parents first."""
    yield pid
    for thread in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            children = thread.read_text().split()
        except OSError:  # It has ended.
            continue
        for child in children:
            yield from _with_descendants(int(child))


def _environment(pid: int) -> dict[str, str]:
    """The variables that a process was started with, paths from the folder that it is in."""
    try:
        folder = Path(f"/proc/{pid}/cwd").resolve()
        content = Path(f"/proc/{pid}/environ").read_bytes()
    except PermissionError as error:
        raise LaunchError(
            f"the environment of process {pid} cannot be read: ask as the user who started it."
        ) from error
    except OSError as error:
        raise LaunchError(f"there is no process {pid} on this host: {_REMEDY}.") from error
    pairs = (os.fsdecode(entry).partition("=") for entry in content.split(b"\0") if entry)
    variables = {name: value for name, _, value in pairs}
    files = (name for name in variables if name.startswith("TFDIST_TLS_") and variables[name])
    return variables | {name: str(folder / variables[name]) for name in files}
