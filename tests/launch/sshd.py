"""Two hosts in network namespaces, on which OpenSSH's server runs."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness.netns import two_hosts

_NETWORK = "10.83.0"
_SERVER = """\
ListenAddress {address}
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/key.pub
PidFile none
UsePAM no
StrictModes no
PasswordAuthentication no
MaxStartups 100
{more}
"""
# `second` is known to ssh alone.
_CLIENT = """\
Host second
  HostName {second}
Host *
  IdentityFile {key}
  IdentitiesOnly yes
  UserKnownHostsFile {folder}/known_hosts
  StrictHostKeyChecking accept-new
  LogLevel ERROR
"""


class SshHosts:
    """The two hosts.

    Args:
        namespaces: their network namespaces.
        folder: for keys and configurations.
    """

    def __init__(self, namespaces: list[str], folder: Path) -> None:
        self.namespaces = namespaces
        self.addresses = [f"{_NETWORK}.1", f"{_NETWORK}.2"]
        self._folder = folder
        self._servers: list[subprocess.Popen[bytes]] = []

    def inside(self, host: int, *command: str) -> list[str]:
        """A command that runs on a host."""
        return ["ip", "netns", "exec", self.namespaces[host], *command]

    def ssh(self, key: str = "key") -> str:
        """The command that reaches the hosts."""
        path = self._folder / f"config-{key}"
        second, key_file = self.addresses[1], self._folder / key
        path.write_text(_CLIENT.format(second=second, key=key_file, folder=self._folder))
        return f"ssh -F {path}"

    def serve(self, more: str = "") -> None:
        """Starts the servers."""
        for name in ("key", "strangers_key", "host_key"):
            if not (self._folder / name).exists():
                words = ["ssh-keygen", "-q", "-N", "", "-t", "ed25519", "-f"]
                subprocess.run([*words, str(self._folder / name)], check=True)
        Path("/run/sshd").mkdir(exist_ok=True)
        for host, address in enumerate(self.addresses):
            path = self._folder / f"sshd-{host}"
            path.write_text(_SERVER.format(address=address, folder=self._folder, more=more))
            command = self.inside(host, "/usr/sbin/sshd", "-D", "-e", "-f", str(path))
            with (self._folder / f"sshd-{host}.log").open("wb") as log:
                self._servers.append(subprocess.Popen(command, stderr=log))
        for host, address in enumerate(self.addresses):
            probe = self.inside(host, "bash", "-c", f"exec 3<>/dev/tcp/{address}/22")
            while subprocess.run(probe, stderr=subprocess.DEVNULL).returncode:
                assert self._servers[host].poll() is None, self.log(host)
                time.sleep(0.05)

    def log(self, host: int) -> str:
        """What a server has said."""
        return (self._folder / f"sshd-{host}.log").read_text()

    def server(self, host: int) -> int:
        """The process ID of a server, whose namespace is the host's."""
        return self._servers[host].pid

    def processes(self, host: int) -> list[str]:
        """The command lines of all processes on a host but its server."""
        own = {server.pid for server in self._servers}
        lines = []
        for pid in self._pids(host):
            with contextlib.suppress(OSError):
                line = Path("/proc", pid, "cmdline").read_bytes().replace(b"\0", b" ").decode()
                if int(pid) not in own and line:
                    lines.append(line)
        return lines

    def _pids(self, host: int) -> list[str]:
        words = ["ip", "netns", "pids", self.namespaces[host]]
        return subprocess.run(words, capture_output=True, text=True).stdout.split()

    def close(self) -> None:
        """Ends the servers, and what they have started."""
        for host in range(len(self._servers)):
            for pid in self._pids(host):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
        for server in self._servers:
            server.kill()
            server.wait()
        self._servers = []


@contextlib.contextmanager
def ssh_hosts(folder: Path) -> Iterator[SshHosts]:
    """The hosts, not serving yet; the test is skipped where that takes more than is here."""
    if shutil.which("ip") is None or not os.path.exists("/usr/sbin/sshd"):
        pytest.skip("OpenSSH's server or iproute2 is not installed (openssh-server, iproute2)")
    with two_hosts("ssh", _NETWORK) as namespaces:
        hosts = SshHosts(namespaces, folder)
        try:
            yield hosts
        finally:
            hosts.close()
