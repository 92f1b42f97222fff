"""What Kubernetes does with an Indexed Job, as far as one machine can: pods in network namespaces.

Each pod's command runs with the pod's environment and names; a pod that ends is treated as the Job
tells, and another one with the same index takes its place.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.engines.conftest import ROOT, clean_environment
from tests.harness.netns import ip

_NETWORK = "10.84.0"


class Kubelet:
    """Runs the pods of one job.

    Args:
        namespaces: a network namespace for each index.
        folder: for logs, and for the names that resolve.
    """

    def __init__(self, namespaces: list[str], folder: Path) -> None:
        self._namespaces = namespaces
        self._folder = folder
        self._names = folder / "hosts"
        self._names.write_text("127.0.0.1 localhost\n")
        self._pods: dict[int, subprocess.Popen[bytes]] = {}
        self._lives = dict.fromkeys(range(len(namespaces)), 0)
        self.failures = dict.fromkeys(range(len(namespaces)), 0)
        self.ended: dict[int, int] = {}

    def apply(self, manifest: str) -> None:
        """Takes the objects in; no pod is started."""
        objects = {made["kind"]: made for made in yaml.safe_load_all(manifest)}
        self._secret = objects["Secret"]["stringData"]["secret"]
        assert objects["Service"]["spec"]["clusterIP"] == "None"
        self.job = objects["Job"]["spec"]
        self._name = objects["Job"]["metadata"]["name"]
        self._pod = self.job["template"]["spec"]
        assert objects["Service"]["metadata"]["name"] == self._pod["subdomain"]

    def start(self, index: int) -> None:
        """Starts the pod with this index, and lets its name resolve."""
        (container,) = self._pod["containers"]
        variables = {e["name"]: self._value(index, e) for e in container["env"]}
        variables |= {
            "JOB_COMPLETION_INDEX": str(index),
            "HOSTNAME": f"{self._name}-{index}",
            "KUBERNETES_SERVICE_HOST": "10.96.0.1",
        }
        program, *words = container["command"]
        assert program == "python"
        enter = ["nsenter", f"--net=/run/netns/{self._namespaces[index]}", "unshare", "--mount"]
        enter += ["sh", "-c", 'mount --bind "$0" /etc/hosts && exec "$@"', str(self._names)]
        with self.log(index).open("ab") as log:
            self._pods[index] = subprocess.Popen(
                [*enter, sys.executable, *words],
                env=clean_environment(**variables),
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        self._lives[index] += 1
        name = f"{self._name}-{index}"
        line = f"{_NETWORK}.{index + 1} {name} {name}.{self._pod['subdomain']}\n"
        if line not in self._names.read_text():
            with self._names.open("a") as file:  # in place, as it is mounted
                file.write(line)

    def _value(self, index: int, entry: dict[str, Any]) -> str:
        if "value" in entry:
            return str(entry["value"])
        if "secretKeyRef" in entry["valueFrom"]:
            return str(self._secret)
        assert entry["valueFrom"] == {"fieldRef": {"fieldPath": "status.podIP"}}
        return f"{_NETWORK}.{index + 1}"

    def answers(self, index: int) -> bool:
        """Whether a pod, which must run, answers its probe at its own address."""
        assert self._pods[index].poll() is None, self.said()
        (container,) = self._pod["containers"]
        asked = container["livenessProbe"]["httpGet"]
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        url = f"http://{_NETWORK}.{index + 1}:{ports[asked['port']]}{asked['path']}"
        program = f"import urllib.request; urllib.request.urlopen({url!r}, timeout=20)"
        command = ["ip", "netns", "exec", self._namespaces[index], sys.executable, "-c", program]
        return subprocess.run(command, stderr=subprocess.DEVNULL).returncode == 0

    def run(self, back_off: float = 1.0) -> str:
        """Goes on until the job has succeeded or failed.

        Args:
            back_off: seconds before a failed pod is made anew, the first time.

        Returns:
            `"Complete"`, or why it has failed.
        """
        due: dict[int, float] = {}
        while self._pods or due:
            time.sleep(0.05)
            for index, when in list(due.items()):
                if when <= time.monotonic():
                    del due[index]
                    self.start(index)
            for index, pod in list(self._pods.items()):
                code = pod.poll()
                if code is None:
                    continue
                del self._pods[index]
                action = self._action(code)
                if action == "Done":
                    self.ended[index] = code
                    continue
                if action == "Count":
                    self.failures[index] += 1
                    if self.failures[index] > self.job["backoffLimitPerIndex"]:
                        self.close()
                        return f"FailedIndexes {index}"
                elif action == "FailJob":
                    self.close()
                    return f"PodFailurePolicy {index}"
                due[index] = time.monotonic() + back_off * 2 ** max(0, self.failures[index] - 1)
        return "Complete"

    def _action(self, code: int) -> str:
        if code == 0:
            return "Done"
        for rule in self.job["podFailurePolicy"]["rules"]:
            if code in rule.get("onExitCodes", {"values": []})["values"]:
                return str(rule["action"])
        return "Count"

    def lives(self) -> list[int]:
        """How many pods each index has had."""
        return [self._lives[index] for index in sorted(self._lives) if self._lives[index]]

    def log(self, index: int) -> Path:
        """The output of all pods with this index."""
        return self._folder / f"pod-{index}.log"

    def said(self) -> str:
        """The output of all pods."""
        logs = [self.log(index) for index in self._lives]
        return "".join(f"--- {log.name}\n{log.read_text()}" for log in logs if log.exists())

    def close(self) -> None:
        """Ends the pods."""
        for pod in self._pods.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pod.pid, signal.SIGKILL)
            pod.wait()
        self._pods = {}


@contextlib.contextmanager
def kubelet(count: int, folder: Path) -> Iterator[Kubelet]:
    """A kubelet for up to `count` indices; the test is skipped where it cannot be made."""
    if shutil.which("nsenter") is None or shutil.which("ip") is None:
        pytest.skip("nsenter or iproute2 is not installed (Debian: util-linux, iproute2)")
    names = [f"kube{os.getpid()}n{i}" for i in range(count)]
    bridge = f"kube{os.getpid()}br"
    try:
        try:
            ip("netns", "add", bridge)
            ip("-n", bridge, "link", "add", "br0", "type", "bridge")
            ip("-n", bridge, "link", "set", "br0", "up")
            for i, name in enumerate(names):
                ip("netns", "add", name)
                peer = ("peer", "name", f"port{i}", "netns", bridge)
                ip("link", "add", "eth0", "netns", name, "type", "veth", *peer)
                ip("-n", bridge, "link", "set", f"port{i}", "master", "br0", "up")
                ip("-n", name, "link", "set", "lo", "up")
                ip("-n", name, "addr", "add", f"{_NETWORK}.{i + 1}/24", "dev", "eth0")
                ip("-n", name, "link", "set", "eth0", "up")
        except RuntimeError as error:
            pytest.skip(f"network namespaces cannot be made here: {error}")
        started = Kubelet(names, folder)
        try:
            yield started
        finally:
            started.close()
    finally:
        for name in [*names, bridge]:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)
