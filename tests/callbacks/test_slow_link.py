"""A worker has slow connections: the monitor names it, other instruments show that data moves."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import tfdist
from tests.deadlines import FAR
from tests.monitoring.traces import check, slices_of
from tests.tiers import exhaustive

pytestmark = [
    exhaustive,
    pytest.mark.skipif(
        os.geteuid() != 0 or shutil.which("ip") is None or shutil.which("tc") is None,
        reason="slow links between network namespaces take root and the commands ip and tc",
    ),
]
ROOT = Path(tfdist.__file__).parents[1]
RANKS = 3
NETWORK = "10.79.0."


def call(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)}: {done.stderr.strip()}")


@pytest.fixture
def hosts() -> Iterator[list[str]]:
    """Network namespaces at one switch, which is in another."""
    mark = f"slow{os.getpid()}"
    switch, names = f"{mark}s", [f"{mark}h{i}" for i in range(RANKS)]
    try:
        try:
            for name in (switch, *names):
                call("ip", "netns", "add", name)
            call("ip", "-n", switch, "link", "add", "name", "switch0", "type", "bridge")
            call("ip", "-n", switch, "link", "set", "switch0", "up")
            for i, name in enumerate(names):
                end = ("ip", "link", "add", "eth0", "netns", name)
                call(*end, "type", "veth", "peer", "name", f"p{i}", "netns", switch)
                call("ip", "-n", switch, "link", "set", f"p{i}", "master", "switch0", "up")
                call("ip", "-n", name, "link", "set", "lo", "up")
                call("ip", "-n", name, "addr", "add", f"{NETWORK}{i + 1}/24", "dev", "eth0")
                call("ip", "-n", name, "link", "set", "eth0", "up")
        except RuntimeError as error:
            pytest.skip(f"network namespaces cannot be made here: {error}")
        yield [*names, switch]
    finally:
        for name in (*names, switch):
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


def slow_down(namespace: str, device: str, rate: str) -> None:
    tc = ("tc", "-n", namespace)
    try:
        call(*tc, "qdisc", "add", "dev", device, "root", "handle", "1:", "htb", "default", "1")
        limit = ("classid", "1:1", "htb", "rate", rate)
        call(*tc, "class", "add", "dev", device, "parent", "1:", *limit)
    except RuntimeError as error:
        pytest.skip(f"links cannot be slowed down here: {error}")


def start(host: str, rank: int, *arguments: str, **settings: str) -> subprocess.Popen[str]:
    workers = [f"{NETWORK}{i + 1}:2222" for i in range(RANKS)]
    cluster = {"cluster": {"worker": workers}, "task": {"type": "worker", "index": rank}}
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "TF_CONFIG": json.dumps(cluster),
        "TFDIST_HOST": host,
        "TFDIST_SECRET": "a secret for this test alone",
        "TFDIST_START_TIMEOUT": str(FAR),
        **settings,
    }
    return subprocess.Popen(
        [
            "ip",
            "netns",
            "exec",
            host,
            sys.executable,
            "-m",
            "tests.callbacks.slow_link",
            *arguments,
        ],
        env=environment,
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def train(hosts: list[str], steps: int, trace: Path, **settings: str) -> list[str]:
    """What each worker writes to stderr."""
    processes = [start(h, r, str(steps), str(trace), **settings) for r, h in enumerate(hosts)]
    try:
        errors = [process.communicate(timeout=FAR)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0] * RANKS, errors
    return errors


@pytest.mark.parametrize("direction", ["sending", "receiving"])
def test_a_slow_link_is_named(hosts, direction, tmp_path):
    *names, switch = hosts
    if direction == "sending":
        slow_down(names[2], "eth0", "30mbit")
    else:
        slow_down(switch, "p2", "30mbit")
    path = tmp_path / "trace.json"
    errors = train(names, 20, path)
    lines = [line for line in errors[0].splitlines() if "keeps the others waiting" in line]
    assert lines, errors[0]
    assert lines[0].startswith(f"tfdist: worker 2 ({NETWORK}3:2222) on host ")
    assert "its connections to other hosts carry" in lines[0]
    # Data moves for longer than anybody is waited for, who is late because of that.
    trace = json.loads(path.read_text())
    check(trace)
    spent = dict.fromkeys(("network", "workers"), 0.0)
    for one in (e for rank in range(RANKS) for e in slices_of(trace, rank, "waiting")):
        spent[one["name"]] += one["dur"]
    assert spent["network"] > spent["workers"], spent
    for rank in range(RANKS):
        steps = sum(e["dur"] for e in slices_of(trace, rank, "step"))
        moving = sum(e["dur"] for e in slices_of(trace, rank, "workers") if e["name"] == "move")
        assert moving > 0.3 * steps


def test_a_stall_by_a_slow_link_is_no_workers_fault(hosts, tmp_path):
    *names, _ = hosts
    # The gradients of a step take seconds, and so do the first weights.
    slow_down(names[2], "eth0", "1mbit")
    folder = tmp_path / "logs"
    train(
        names,
        2,
        tmp_path / "trace.json",
        TFDIST_STALL_WARNING="3",
        TFDIST_FLIGHT_DIR=str(folder),
    )
    command = [sys.executable, "-m", "tfdist", "doctor", "--flight", str(folder), "--json"]
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    findings = json.loads(done.stdout)["findings"]
    assert {one["kind"] for one in findings} == {"transfer"}, findings
    assert "the transfer is slow or does not move" in findings[0]["text"]
