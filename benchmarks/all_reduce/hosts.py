"""The hosts that ranks run on: this host, or network namespaces that a bridge connects."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from benchmarks.all_reduce.cleanup import undisturbed


@dataclass(frozen=True)
class Hosts:
    """Hosts by number.

    Attributes:
        addresses: for each host, the address at which the other hosts reach it.
        interface: the name of the network interface with this address, the same on all hosts.
        namespaces: for each host, its network namespace; empty if this host is the only host.
    """

    addresses: Sequence[str]
    interface: str
    namespaces: Sequence[str] = ()

    @property
    def count(self) -> int:
        return len(self.addresses)

    def prefix(self, host: int) -> list[str]:
        """Returns the words that precede a command so that it runs on a host.

        A network namespace also gets its own host name, because MPI distinguishes hosts by name.
        """
        if not self.namespaces:
            return []
        rename = 'hostname "$0" && exec "$@"'
        name = self.namespaces[host]
        return ["ip", "netns", "exec", name, "unshare", "--uts", "sh", "-c", rename, name]


HERE = Hosts(["127.0.0.1"], "lo")


def parse_hosts(text: str) -> int:
    """Returns N for `netns:N`, which means N namespaces; 0 for "", which means this host.

    Raises:
        ValueError: the text is neither.
    """
    if not text:
        return 0
    match = re.fullmatch(r"netns:(\d+)", text)
    if not match or not 1 <= int(match[1]) <= 200:
        raise ValueError(
            f"Hosts are netns:N with N from 1 to 200, or nothing for this host. Received: {text!r}"
        )
    return int(match[1])


@contextlib.contextmanager
def make_hosts(count: int, rate: str) -> Iterator[Hosts]:
    """Creates network namespaces that a bridge connects, and removes them at the end.

    Args:
        count: the number of hosts; 0 for this host only, without a limit.
        rate: the rate at which each host may send, as `tc` writes it: `1gbit`; "" for no limit.

    Raises:
        RuntimeError: this process is not root, iproute2 is missing, or a command failed.
    """
    if not count:
        yield HERE
        return
    if os.geteuid() or not shutil.which("tc"):
        raise RuntimeError(
            "Network namespaces take root and the commands ip and tc: apt-get install iproute2"
        )
    # The names contain this process's ID; an interface's name has at most 15 characters.
    names = [f"ar{os.getpid()}h{i}" for i in range(count)]
    switch = f"ar{os.getpid()}switch"
    addresses = [f"10.77.0.{10 + i}" for i in range(count)]
    try:
        run(f"ip netns add {switch}")
        run(f"ip -n {switch} link add bridge type bridge")
        run(f"ip -n {switch} link set bridge up")
        for i, (name, address) in enumerate(zip(names, addresses, strict=True)):
            run(f"ip netns add {name}")
            run(f"ip -n {name} link set lo up")
            run(f"ip link add eth0 netns {name} type veth peer name port{i} netns {switch}")
            run(f"ip -n {name} addr add {address}/24 dev eth0")
            run(f"ip -n {name} link set eth0 up")
            run(f"ip -n {switch} link set port{i} master bridge")
            run(f"ip -n {switch} link set port{i} up")
            if rate:
                bucket = f"tbf rate {rate} burst 256kb latency 100ms"
                run(f"ip netns exec {name} tc qdisc add dev eth0 root {bucket}")
        yield Hosts(addresses, "eth0", names)
    finally:
        with undisturbed():
            for name in [*names, switch]:
                subprocess.run(["ip", "netns", "del", name], capture_output=True)


def run(command: str) -> None:
    """Runs a command of iproute2.

    Raises:
        RuntimeError: the command failed; the error contains its message.
    """
    done = subprocess.run(command.split(), capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{command}: {done.stderr.strip()}")
