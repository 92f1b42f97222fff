"""A worker has slow connections: who names it, and what a timeline shows."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import tfdist
from tests.harness.deadlines import FAR
from tests.harness.tiers import exhaustive
from tests.monitoring.traces import check, slices_of

pytestmark = [
    exhaustive,
    pytest.mark.skipif(
        os.geteuid() != 0 or shutil.which("ip") is None or shutil.which("tc") is None,
        reason="slow links between network namespaces take root and the commands ip and tc",
    ),
]
ROOT = Path(tfdist.__file__).parents[1]
SECRET = "a secret for this test alone"
NETWORK = "10.79.0."


def call(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)}: {done.stderr.strip()}")


@pytest.fixture
def hosts(request: pytest.FixtureRequest) -> Iterator[list[str]]:
    """Network namespaces at one switch, which is in another; three unless a test asks for two."""
    mark, count = f"slow{os.getpid()}", getattr(request, "param", 3)
    switch, names = f"{mark}s", [f"{mark}h{i}" for i in range(count)]
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


def addresses(hosts: int, each: int = 1) -> list[str]:
    """Of the workers, so many on each host."""
    return [f"{NETWORK}{i + 1}:{2222 + k}" for i in range(hosts) for k in range(each)]


def start(
    host: str, rank: int, workers: list[str], *arguments: str, **settings: str
) -> subprocess.Popen[str]:
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
    """A training of all hosts; what each worker writes to stderr is in `errors` after the block.

    `each` is the number of workers of a host.
    """

    def __init__(
        self, hosts: list[str], *arguments: object, each: int = 1, **settings: str
    ) -> None:
        words = list(map(str, arguments))
        workers = addresses(len(hosts), each)
        places = [host for host in hosts for _ in range(each)]
        self.processes = [start(h, r, workers, *words, **settings) for r, h in enumerate(places)]
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
            assert {p.returncode for p in self.processes} == {0}, self.errors

    def runs(self) -> bool:
        return all(process.poll() is None for process in self.processes)


def train(hosts: list[str], *arguments: object, each: int = 1, **settings: str) -> list[str]:
    """What each worker writes to stderr."""
    with Training(hosts, *arguments, each=each, **settings) as training:
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


def slow_down_the_last(hosts: list[str], direction: str, rate: str) -> None:
    """What the last host sends or receives is slow."""
    *names, switch = hosts
    place = (names[-1], "eth0") if direction == "sending" else (switch, f"p{len(names) - 1}")
    slow_down(*place, rate)


def said_of(hosts: int, each: int, direction: str) -> str:
    """A pattern of what is said of the slow links of the last host."""
    last, end = each * (hosts - 1), addresses(hosts, each)
    if hosts > 2:
        return (
            rf"worker {last} \({re.escape(end[last])}\) on (host )?\S+ keeps the others waiting: "
            "its connections to other hosts carry"
        )
    # Which of the two has the slow network, nobody can tell.
    ranks = [range(last), range(last, last + each)]
    sender, receiver = (
        "|".join(rf"worker {r} \({re.escape(end[r])}\) on (host )?\S+" for r in of_host)
        for of_host in (ranks if direction == "receiving" else ranks[::-1])
    )
    subject = f"The connections from ({sender}) to ({receiver})"
    return f"{subject} keep the others waiting: (they carry|data queues)"


@pytest.mark.parametrize("direction", ["sending", "receiving"])
@pytest.mark.parametrize(
    ("hosts", "each", "kind"),
    [(3, 1, "fit"), (2, 1, "fit"), (2, 2, "fit"), (3, 1, "int8"), (2, 1, "1f1b")],
    indirect=["hosts"],
)
def test_the_monitor_names_a_slow_link(hosts, each, kind, direction, tmp_path):
    slow_down_the_last(hosts, direction, "30mbit")
    *names, _ = hosts
    errors = train(names, kind, 20, tmp_path / "trace.json", each=each)
    # On a busy machine a worker may be named for its computation in some steps.
    begins = ("keep the others waiting", "keeps the others waiting: its connections")
    lines = [line for line in errors[0].splitlines() if any(begin in line for begin in begins)]
    assert lines, errors[0]
    said = f"tfdist: {said_of(len(names), each, direction)}"
    assert all(re.match(said, line) for line in lines), lines


@pytest.mark.parametrize("direction", ["sending", "receiving"])
def test_a_timeline_shows_a_slow_link(hosts, direction, tmp_path):
    slow_down_the_last(hosts, direction, "30mbit")
    *names, _ = hosts
    path = tmp_path / "trace.json"
    train(names, "fit", 20, path)
    # Data moves for longer than anybody is waited for, who is late because of that.
    trace = json.loads(path.read_text())
    check(trace)
    spent = dict.fromkeys(("network", "workers"), 0.0)
    for one in (e for rank in range(len(names)) for e in slices_of(trace, rank, "waiting")):
        spent[one["name"]] += one["dur"]
    assert spent["network"] > spent["workers"], spent
    for rank in range(len(names)):
        steps = sum(e["dur"] for e in slices_of(trace, rank, "step"))
        moving = sum(e["dur"] for e in slices_of(trace, rank, "workers") if e["name"] == "move")
        assert moving > 0.3 * steps
    assert re.match(said_of(len(names), 1, direction), trace["otherData"]["straggler"])


def test_a_stall_by_a_stuck_transfer_is_no_workers_fault(hosts, tmp_path):
    *names, _ = hosts
    slow_down(names[2], "eth0", "100mbit")
    tc = ("tc", "-n", names[2])
    # Signs of life pass, since they are small.
    call(
        *tc, "class", "add", "dev", "eth0", "parent", "1:", "classid", "1:2", "htb", "rate", "1mbit"
    )
    small = ("u32", "match", "u16", "0", "0xfe00", "at", "2", "flowid", "1:2")
    call(*tc, "filter", "add", "dev", "eth0", "parent", "1:", "protocol", "ip", *small)
    folder, stop = tmp_path / "logs", tmp_path / "stop"
    folder.mkdir()
    settings = {"TFDIST_STALL_WARNING": "8", "TFDIST_FLIGHT_DIR": str(folder)}
    with Training(names, "fit", 2, "none", stop, **settings) as training:
        begin = time.monotonic()
        while training.runs() and "steps" not in ask(names[0]):
            assert time.monotonic() < begin + FAR
        changed = (
            "class",
            "change",
            "dev",
            "eth0",
            "parent",
            "1:",
            "classid",
            "1:1",
            "htb",
            "rate",
        )
        call(*tc, *changed, "64bit")
        while training.runs() and not list(folder.iterdir()):
            time.sleep(0.5)
            assert time.monotonic() < begin + FAR
        call(*tc, *changed, "100mbit")
        stop.touch()
    command = [sys.executable, "-m", "tfdist", "doctor", "--flight", str(folder), "--json"]
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    findings = json.loads(done.stdout)["findings"]
    assert {one["kind"] for one in findings} == {"transfer"}, findings
    for one in findings:
        assert "the transfer is slow or stuck. Data is on its way" in one["text"]
        for backlog in one["backlogs"]:
            assert f"worker 2 ({NETWORK}3:2222)" in (backlog["sender"], backlog["receiver"])


@pytest.mark.parametrize(
    ("hosts", "each", "kind", "direction", "rate"),
    [
        (3, 1, "fit", "sending", "30mbit"),
        (3, 1, "fit", "receiving", "30mbit"),
        (3, 1, "fit", "sending", "2mbit"),
        (2, 1, "1f1b", "sending", "30mbit"),
        (2, 2, "fit", "receiving", "30mbit"),
    ],
    indirect=["hosts"],
)
def test_the_live_view_names_a_slow_link(hosts, each, kind, direction, rate, tmp_path):
    slow_down_the_last(hosts, direction, rate)
    *names, _ = hosts
    words = said_of(len(names), each, direction)
    if rate == "2mbit":
        words = rf"Data is on its way from worker 2 \({NETWORK}3:2222\) to worker"
    stop = tmp_path / "stop"
    with Training(names, kind, 4, tmp_path / "trace.json", stop, each=each) as training:
        headline = ""
        while training.runs() and not re.search(words, headline):
            headline = ask(names[0])
        stop.touch()
    assert re.search(words, headline), headline
