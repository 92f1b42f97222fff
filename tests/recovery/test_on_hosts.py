"""Launchers on several hosts: what they know of their workers' deaths lets others go on."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import tfdist
from tests.harness.deadlines import FAR
from tests.harness.netns import ip, two_hosts
from tests.harness.tiers import exhaustive
from tests.recovery.test_surviving import check
from tfdist._src.cluster.membership.record import folder as records
from tfdist._src.options import PREEMPTED

ROOT = Path(tfdist.__file__).parents[1]
# Not that of other tests that run meanwhile, whose members have records, too.
NETWORK = f"10.78.{os.environ.get('PYTEST_XDIST_WORKER', 'gw0')[2:]}"


@pytest.fixture
def hosts():
    with two_hosts("lau", NETWORK) as names:
        yield names


@pytest.fixture
def no_records():
    """No member leaves its record behind."""
    before = set(records().glob("*"))
    yield
    for path in set(records().glob("*")) - before:
        with contextlib.suppress(FileNotFoundError):
            assert f"{NETWORK}." not in path.read_text()


@pytest.fixture
def job(hosts, tmp_path):
    """Starts a job with as many workers on each of two hosts."""
    launchers = []

    def begin(workers, faults, wait=0, options=(), **settings):
        for number, host in enumerate(hosts):
            command = [
                *("ip", "netns", "exec", host, sys.executable, "-m", "tfdist", "run", "--elastic"),
                *("-n", str(workers), "--nnodes", "2", "--node-rank", str(number)),
                *("--rendezvous", f"{NETWORK}.1:4711", "--spares", "0", *options),
                *("-m", "tests.recovery.on_hosts", tmp_path, json.dumps(faults), str(wait)),
            ]
            environment = {
                **os.environ,
                "PYTHONPATH": str(ROOT),
                "TFDIST_HOST": host,
                "TFDIST_HEARTBEAT_TIMEOUT": "10",
                **settings,
            }
            with open(tmp_path / f"launcher-{number}", "wb") as out:
                launchers.append(
                    subprocess.Popen(command, env=environment, cwd=ROOT, stdout=out, stderr=out)
                )
        return launchers

    yield begin
    for launcher in launchers:
        with contextlib.suppress(ProcessLookupError):
            launcher.kill()
        launcher.wait()


def ended(launchers, folder):
    """The exit codes; the answers by worker and life."""
    codes = [launcher.wait(FAR) for launcher in launchers]
    answers = {path.stem: pickle.loads(path.read_bytes()) for path in folder.glob("*.answer")}
    said = "\n".join((folder / f"launcher-{number}").read_text() for number in range(2))
    return codes, answers, said


def pids(folder):
    return {path.stem: int(path.read_text()) for path in folder.glob("*.life")}


@exhaustive
@pytest.mark.parametrize(
    ("workers", "victims"), [(1, [0]), (2, [0, 1]), (2, [0, 3]), (2, [0, 1, 2])]
)
@pytest.mark.parametrize("phase", ["before", "backward"])
def test_the_others_go_on_while_the_host_of_the_dead_lives(
    job, tmp_path, no_records, workers, victims, phase
):
    faults = dict.fromkeys(victims, (phase, 9, "kill"))
    launchers = job(workers, faults, options=["--max-restarts", "0"])
    codes, answers, said = ended(launchers, tmp_path)
    assert codes == [0, 0], said
    left = [rank for rank in range(2 * workers) if rank not in victims]
    assert set(answers) == {f"{rank}-0" for rank in left}
    check({rank: answers[f"{rank}-0"] for rank in left}, left)


@exhaustive
@pytest.mark.parametrize("victims", [[0], [0, 1]])
def test_replacements_come_to_those_that_went_on(job, tmp_path, no_records, victims):
    faults = dict.fromkeys(victims, ("backward", 9, "kill"))
    workers = len(victims)
    codes, answers, said = ended(job(workers, faults, wait=12), tmp_path)
    assert codes == [0, 0], said
    names = [f"{rank}-{int(rank in victims)}" for rank in range(2 * workers)]
    assert set(answers) == set(names)
    results, expected = check({name: answers[name] for name in names}, names)
    survivor = results[names[-1]]
    assert survivor["events"] == expected["events"]
    assert survivor["changes"][0] == (2 * workers, workers)


@exhaustive
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("host", [0, 1])
def test_only_the_workers_of_a_host_leave_whose_launcher_is_told_to_stop(
    job, tmp_path, no_records, workers, host
):
    leaving = range(host * workers, (host + 1) * workers)
    faults = {leaving[0]: ("before", 9, "stop")}
    launchers = job(workers, faults, TFDIST_HEARTBEAT_TIMEOUT="60", LEAVES="1")
    until(lambda: is_stopped(pids(tmp_path).get(f"{leaving[0]}-0")))
    stopped = pids(tmp_path)[f"{leaving[0]}-0"]
    launchers[host].terminate()
    until(lambda: is_pending(stopped, signal.SIGTERM))
    os.kill(stopped, signal.SIGCONT)
    codes, answers, said = ended(launchers, tmp_path)
    assert codes == [PREEMPTED if one == host else 0 for one in range(2)], said
    left = [rank for rank in range(2 * workers) if rank not in leaving]
    assert set(answers) == {f"{rank}-0" for rank in left}
    results, _ = check({rank: answers[f"{rank}-0"] for rank in left}, left)
    assert all(result["changes"] == [(2 * workers, workers)] for result in results.values())
    assert not list((tmp_path / "snapshots").glob("step-*"))  # The others have the whole state.


@exhaustive
@pytest.mark.parametrize("how", ["launcher", "host", "network"])
def test_a_host_that_is_lost_gives_no_evidence(job, hosts, tmp_path, how):
    """Nobody can tell it from one that is cut off and goes on."""
    launchers = job(1, {0: ("before", 9, "stop")}, TFDIST_START_TIMEOUT="90")
    until(lambda: is_stopped(pids(tmp_path).get("0-0")))
    if how != "launcher":
        ip("-n", hosts[0], "link", "set", "eth0", "down")
    if how != "network":
        launchers[0].kill()  # its watchdog kills the worker
    done, said = answer(tmp_path, "1-0")
    assert not done
    assert "GroupLostError" in said and "is no majority" in said
    if how == "network":
        os.kill(pids(tmp_path)["0-0"], signal.SIGCONT)
        check({0: answer(tmp_path, "0-0")}, [0])


def until(condition):
    deadline = time.monotonic() + FAR
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def answer(folder, name):
    """The answer of a worker, once it has given one."""
    path = folder / f"{name}.answer"
    until(path.exists)
    return pickle.loads(path.read_bytes())


def is_pending(pid, number):
    """Whether a signal has been sent to a process that is stopped."""
    [mask] = re.findall(r"^ShdPnd:\s*(\w+)$", Path(f"/proc/{pid}/status").read_text(), re.M)
    return int(mask, 16) >> (number - 1) & 1


def is_stopped(pid):
    try:
        return pid is not None and "\nState:\tT" in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False
