"""`tfdist run --hosts`, from its options to its exit code."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence

from tfdist._src.cluster.auth.handshake import VARIABLE, new_secret
from tfdist._src.launch.job.forwarded import forwarded
from tfdist._src.launch.job.run_options import RunOptions
from tfdist._src.launch.job.signals import Signals
from tfdist._src.launch.ssh.job import HostsJob, joined, launcher_arguments
from tfdist._src.launch.ssh.remote_host import is_this_machine, remote_command
from tfdist._src.options import Options
from tfdist.errors import LaunchError


def run_on_hosts(options: RunOptions) -> int:
    """Runs the launchers of all hosts until they have ended.

    Args:
        options: those of the command, with `hosts`.

    Returns:
        The job's exit code, as the launchers tell it.

    Raises:
        LaunchError: a host cannot be reached, or does not fit.
    """
    try:
        ssh = _split(options.ssh)
        variables = forwarded(os.environ, options.forward)
        settings = Options.from_environment()
    except ValueError as error:
        raise LaunchError(str(error)) from error
    if options.dry_run:
        return _show(options, ssh)
    variables[VARIABLE] = os.environ.get(VARIABLE) or new_secret()
    with Signals() as signals:
        job = HostsJob(
            options,
            ssh,
            {"environment": variables},
            signals,
            timeout=settings.start_timeout,
            silence=settings.heartbeat_timeout,
        )
        try:
            job.start()
            return job.run()
        finally:
            job.end()


def _split(command: str) -> tuple[str, ...]:
    try:
        words = tuple(shlex.split(command))
    except ValueError as error:
        raise ValueError(f"--ssh must be a command: {error}. Received: {command!r}") from error
    if not words:
        raise ValueError("--ssh must be a command, such as 'ssh -p 2222'. Received: ''")
    return words


def _show(options: RunOptions, ssh: Sequence[str]) -> int:
    address = "HOST0:PORT" if options.rendezvous is None else joined(*options.rendezvous)
    for number, host in enumerate(options.hosts):
        where = "here" if is_this_machine(host) else shlex.join((*ssh, host.name))
        print(f"host {number} ({where}): {remote_command()}")
        print(f"  tfdist run {shlex.join(launcher_arguments(options, number, address))}")
    return 0
