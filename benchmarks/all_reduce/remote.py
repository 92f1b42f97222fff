"""Writes a replacement for ssh that runs commands in network namespaces.

The launchers of MPI use ssh to start ranks on other hosts. Here, network namespaces take the place
of these hosts.
"""

from __future__ import annotations

import shlex
from pathlib import Path

from benchmarks.all_reduce.hosts import Hosts


def write_agent(path: Path, hosts: Hosts) -> Path:
    """Writes a script that, like ssh, takes options, a host's address, and a command.

    The script ignores the options, and runs the command in the network namespace of the host.

    Args:
        path: the path of the script.
        hosts: the hosts, each with a network namespace.

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
