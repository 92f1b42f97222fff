"""A cluster of Slurm on this machine: MUNGE, the controller and two nodes, in a namespace."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness.netns import ip

PROGRAMS = ("slurmctld", "slurmd", "srun", "munged", "munge", "ip")
_SECONDS = 60
_ADDRESS = "10.79.0.1"
_CONFIGURATION = """\
ClusterName=test
SlurmctldHost={host}({address})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
JobAcctGatherType=jobacct_gather/none
ReturnToService=2
MpiDefault=none
KillWait=60
NodeName=n[1-2] NodeHostname={host} NodeAddr={address} Port=[17001-17002] CPUs=4
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


class SlurmCluster:
    """The running cluster.

    Args:
        namespace: its network namespace.
        folder: its files.
    """

    def __init__(self, namespace: str, folder: Path) -> None:
        self._namespace, self._folder = namespace, folder

    @property
    def variables(self) -> dict[str, str]:
        """What its commands need in the environment."""
        return {"SLURM_CONF": str(self._folder / "slurm.conf")}

    def inside(self, *command: str) -> list[str]:
        """The command that runs another one in the namespace."""
        # Unlike `ip netns exec`, this leaves /sys as it is, where slurmd needs control groups.
        enter = ["nsenter", f"--net=/run/netns/{self._namespace}", "unshare", "--mount"]
        names = [
            "sh",
            "-c",
            'mount --bind "$0" /etc/hosts && exec "$@"',
            str(self._folder / "hosts"),
        ]
        return [*enter, *names, *command]

    def run(self, *command: str) -> str:
        """What a command in the namespace prints; it must succeed."""
        environment = {**os.environ, **self.variables}
        done = subprocess.run(
            self.inside(*command), env=environment, capture_output=True, text=True, timeout=_SECONDS
        )
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout

    def start(self) -> None:
        """Starts all daemons, and waits until both nodes are idle."""
        for name in ("state", "munge"):
            (self._folder / name).mkdir(mode=0o700)
        names = f"127.0.0.1 localhost\n{_ADDRESS} n1 n2 {socket.gethostname()}\n"
        (self._folder / "hosts").write_text(names)
        key = self._folder / "munge" / "key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        configuration = _CONFIGURATION.format(
            host=socket.gethostname(), address=_ADDRESS, folder=self._folder
        )
        (self._folder / "slurm.conf").write_text(configuration)
        files = {name: self._folder / "munge" / name for name in ("pid", "log", "seed")}
        options = [f"--{name}-file={path}" for name, path in files.items()]
        self.run("munged", "--force", f"--key-file={key}", *options)
        self.run("slurmctld")
        for node in ("n1", "n2"):
            self.run("slurmd", "-N", node)
        end = time.monotonic() + _SECONDS
        while self.run("sinfo", "-h", "-o", "%D %t").strip() != "2 idle":
            assert time.monotonic() < end, (self._folder / "slurmctld.log").read_text()
            time.sleep(0.5)

    def stop(self) -> None:
        """Ends all that runs in the namespace."""
        for signal in ("-TERM", "-KILL"):
            found = subprocess.run(
                ["ip", "netns", "pids", self._namespace], capture_output=True, text=True
            )
            if not (pids := found.stdout.split()):
                return
            subprocess.run(["kill", signal, *pids], capture_output=True)
            time.sleep(1.0)


@contextlib.contextmanager
def slurm_cluster() -> Iterator[SlurmCluster]:
    """Starts a cluster; the test is skipped where the programs or the rights for it are missing."""
    missing = [program for program in PROGRAMS if shutil.which(program) is None]
    if missing:
        pytest.skip(f"{missing[0]} is not installed (Debian: slurm-wlm, munge, iproute2)")
    name = f"slurm{os.getpid()}"
    try:
        ip("netns", "add", name)
        ip("-n", name, "link", "add", "eth0", "type", "veth", "peer", "name", "eth1")
    except RuntimeError as error:
        pytest.skip(f"network namespaces cannot be made here: {error}")
    Path("/run/munge").mkdir(mode=0o755, exist_ok=True)
    cluster = None
    try:
        ip("-n", name, "addr", "add", f"{_ADDRESS}/24", "dev", "eth0")
        for device in ("lo", "eth0", "eth1"):
            ip("-n", name, "link", "set", device, "up")
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            cluster = SlurmCluster(name, Path(folder))
            try:
                cluster.start()
                yield cluster
            finally:
                cluster.stop()
    finally:
        subprocess.run(["ip", "netns", "del", name], capture_output=True)
