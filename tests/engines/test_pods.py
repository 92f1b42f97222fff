"""Two pods of an Indexed Job, each in a network namespace, whose names resolve late."""

import subprocess
import time
from pathlib import Path

import pytest

from tests.engines.conftest import ROOT, SCRIPT, clean_environment, loss_in
from tests.harness.netns import two_hosts
from tests.harness.tiers import exhaustive

_NETWORK = "10.82.0"
_NAMES = "".join(f"{_NETWORK}.{i + 1} train-{i} train-{i}.workers\n" for i in range(2))


@pytest.fixture
def hosts():
    with two_hosts("pod", _NETWORK) as names:
        yield names


def inside(namespace: str, names: Path, command: list[str]) -> list[str]:
    """A command in a namespace, which resolves the names in a file."""
    enter = ["nsenter", f"--net=/run/netns/{namespace}", "unshare", "--mount"]
    return [*enter, "sh", "-c", 'mount --bind "$0" /etc/hosts && exec "$@"', str(names), *command]


@exhaustive
def test_pods_come_one_after_the_other(hosts, tmp_path, alone):
    names = tmp_path / "hosts"
    names.write_text("127.0.0.1 localhost\n")
    pods = []
    for index, host in enumerate(hosts):
        variables = {
            "JOB_COMPLETION_INDEX": str(index),
            "HOSTNAME": f"train-{index}",
            "TFDIST_WORKERS": "2",
            "TFDIST_SERVICE": "workers",
            "TFDIST_SECRET": "from a Secret",
            "KUBERNETES_SERVICE_HOST": "10.96.0.1",
        }
        log = tmp_path / f"{index}.log"
        with log.open("w") as output:
            pod = subprocess.Popen(
                inside(host, names, SCRIPT),
                env=clean_environment(**variables),
                cwd=ROOT,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        pods.append(pod)
        while "to resolve [" not in log.read_text():
            assert pod.poll() is None, log.read_text()
            time.sleep(0.5)
    assert "worker 1 (train-1.workers:2222) waiting for its own name to resolve" in log.read_text()
    with names.open("a") as file:  # in place, as it is mounted
        file.write(_NAMES)
    assert [pod.wait(300) for pod in pods] == [0, 0], log.read_text()
    said = [(tmp_path / f"{index}.log").read_text() for index in range(2)]
    assert loss_in("".join(said)) == pytest.approx(alone, abs=2e-3)
    assert "anyone who can reach" not in said[0]
