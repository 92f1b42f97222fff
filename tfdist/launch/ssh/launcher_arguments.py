"""What the launcher of each host is passed."""

from __future__ import annotations

from tfdist.launch.job.run_options import RunOptions


def launcher_arguments(options: RunOptions, number: int, rendezvous: str) -> list[str]:
    """The command line of one host's launcher, without `tfdist run`.

    Args:
        options: those of the command.
        number: the host's number.
        rendezvous: where the launchers of several hosts meet.
    """
    workers = options.hosts[number].workers
    own = ["-n", "auto" if workers is None else str(workers)]
    if len(options.hosts) > 1:
        own += ["--nnodes", str(len(options.hosts)), "--node-rank", str(number)]
        own += ["--rendezvous", rendezvous]
    return [*own, *options.launcher_arguments]


def joined(host: str, port: int) -> str:
    """`"host:port"`, with an IPv6 host in brackets.

    Example:
        >>> joined("fd00::1", 29400)
        '[fd00::1]:29400'
    """
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
