"""Where the ranks run: on this host, or on hosts made of network namespaces on one bridge."""

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
        addresses: for each host the address where the others reach it.
        interface: the name of the network interface that has the address, the same on each.
        namespaces: for each host its network namespace; empty where the only host is this one.
    """

    addresses: Sequence[str]
    interface: str
    namespaces: Sequence[str] = ()

    @property
    def count(self) -> int:
        return len(self.addresses)

    def prefix(self, host: int) -> list[str]:
        """What stands before a command so that it runs on a host.

        A made host has its own name as well, by which MPI tells hosts apart.
        """
        if not self.namespaces:
            return []
        rename = 'hostname "$0" && exec "$@"'
        name = self.namespaces[host]
        return ["ip", "netns", "exec", name, "unshare", "--uts", "sh", "-c", rename, name]


HERE = Hosts(["127.0.0.1"], "lo")


def parse_hosts(text: str) -> int:
    """The number of namespaces that `netns:N` asks for; 0 for an empty text, which is this host.

    Raises:
        ValueError: it is neither.
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
    """Makes hosts of network namespaces on one bridge, and removes them in the end.

    Args:
        count: how many; 0 gives this host alone, unlimited.
        rate: what each may send, in the words of `tc`: `1gbit`; empty for no limit.

    Raises:
        RuntimeError: it takes root and iproute2.
    """
    if not count:
        yield HERE
        return
    if os.geteuid() or not shutil.which("tc"):
        raise RuntimeError(
            "Network namespaces take root and the commands ip and tc: apt-get install iproute2"
        )
    # The names tell which process made them; an interface's name has 15 characters at most.
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
        RuntimeError: it failed; with its message.
    """
    done = subprocess.run(command.split(), capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{command}: {done.stderr.strip()}")
