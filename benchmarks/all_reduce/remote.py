"""A replacement for ssh, with which MPI's launchers start processes in network namespaces."""

from __future__ import annotations

import shlex
from pathlib import Path

from benchmarks.all_reduce.hosts import Hosts


def write_agent(path: Path, hosts: Hosts) -> Path:
    """Writes a script that takes options, an address and a command, like ssh.

    Args:
        path: the path of the script.
        hosts: the hosts, which are network namespaces.

    Returns:
        The path of the script.
    """
    cases = [
        f'{address}) exec {shlex.join(hosts.prefix(i))} sh -c "$*" ;;'
        for i, address in enumerate(hosts.addresses)
    ]
    lines = [
        "#!/bin/sh",
        'while [ "${1#-}" != "$1" ]; do shift; done',
        "address=$1; shift",
        'case "$address" in',
        *cases,
        "esac",
        'echo "no such host: $address" >&2; exit 1',
    ]
    path.write_text("\n".join(lines) + "\n")
    path.chmod(0o755)
    return path
