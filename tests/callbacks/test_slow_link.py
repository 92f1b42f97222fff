"""A worker has slow connections: who names it, and what a timeline shows."""

from __future__ import annotations

import json
import os
import re
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
SECRET = "a secret for this test alone"
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
        "TFDIST_SECRET": SECRET,
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


class Training:
    """A training of all hosts; what each worker writes to stderr is in `errors` after the block."""

    def __init__(self, hosts: list[str], *arguments: object, **settings: str) -> None:
        words = list(map(str, arguments))
        self.processes = [start(h, r, *words, **settings) for r, h in enumerate(hosts)]
        self.errors: list[str] = []

    def __enter__(self) -> Training:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            if kind is None:
                self.errors = [p.communicate(timeout=FAR)[1] for p in self.processes]
        finally:
            for process in self.processes:
                process.kill()
        if kind is None:
            assert [p.returncode for p in self.processes] == [0] * RANKS, self.errors

    def runs(self) -> bool:
        return all(process.poll() is None for process in self.processes)


def train(hosts: list[str], *arguments: object, **settings: str) -> list[str]:
    """What each worker writes to stderr."""
    with Training(hosts, *arguments, **settings) as training:
        pass
    return training.errors


def ask(host: str) -> str:
    """The live view's headline; "" before the job can be asked."""
    words = ("ip", "netns", "exec", host, sys.executable, "-m", "tfdist", "doctor", "--json")
    done = subprocess.run(
        [*words, "--job", f"{NETWORK}1:2222"],
        env={**os.environ, "PYTHONPATH": str(ROOT), "TFDIST_SECRET": SECRET},
        capture_output=True,
        text=True,
    )
    return json.loads(done.stdout)["headline"] if done.returncode == 0 else ""


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
    for one in findings:
        assert "the transfer is slow or does not move. Data is on its way" in one["text"]
        for backlog in one["backlogs"]:
            assert f"worker 2 ({NETWORK}3:2222)" in (backlog["sender"], backlog["receiver"])


@pytest.mark.parametrize(
    ("direction", "rate"), [("sending", "30mbit"), ("receiving", "30mbit"), ("sending", "2mbit")]
)
def test_the_live_view_names_a_slow_link(hosts, direction, rate, tmp_path):
    *names, switch = hosts
    place = (names[2], "eth0") if direction == "sending" else (switch, "p2")
    slow_down(*place, rate)
    stop = tmp_path / "stop"
    with Training(names, 4, tmp_path / "trace.json", stop) as training:
        headline = ""
        who = re.escape(f"worker 2 ({NETWORK}3:2222)")
        words = {
            "30mbit": rf"{who} on \S+ keeps the others waiting: its connections to other hosts",
            "2mbit": f"Data is on its way from {who} to worker",
        }[rate]
        while training.runs() and not re.search(words, headline):
            headline = ask(names[0])
        stop.touch()
    assert re.search(words, headline)
