"""The hosts that the ranks run on: this host, or several network namespaces in place of hosts."""

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
    """The hosts that the ranks run on, numbered from 0.

    Attributes:
        addresses: for each host, the address at which the other hosts reach it.
        interface: the name of the network interface that has this address. The name is the same on
            all hosts.
        namespaces: for each host, the name of its network namespace. Empty if all ranks run on this
            host.
    """

    addresses: Sequence[str]
    interface: str
    namespaces: Sequence[str] = ()

    @property
    def count(self) -> int:
        return len(self.addresses)

    def prefix(self, host: int) -> list[str]:
        """Returns the words to put before a command so that the command runs on a host.

        In a network namespace, the command also sees a separate host name, because MPI
        distinguishes hosts by their names.
        """
        if not self.namespaces:
            return []
        rename = 'hostname "$0" && exec "$@"'
        name = self.namespaces[host]
        return ["ip", "netns", "exec", name, "unshare", "--uts", "sh", "-c", rename, name]


HERE = Hosts(["127.0.0.1"], "lo")


def parse_hosts(text: str) -> int:
    """Parses the value of the flag `--hosts`.

    Returns:
        The number N of network namespaces for `netns:N`; 0 for the empty text, which stands for
        this host.

    Raises:
        ValueError: the text is neither of these.
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
    """Creates network namespaces that are connected by a bridge; removes them at the end.

    Args:
        count: the number of namespaces. If it is 0, nothing is created, `rate` is ignored, and this
            host is the only host.
        rate: the maximum rate at which each host sends, in the notation of `tc`, such as `1gbit`;
            "" for no limit.

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
    # The names contain this process's ID, so that two benchmarks can run at the same time.
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
        RuntimeError: the command failed. The exception contains the command's error message.
    """
    done = subprocess.run(command.split(), capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{command}: {done.stderr.strip()}")
