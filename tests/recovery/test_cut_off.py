"""The network between two hosts is cut: one side goes on, and the other one ends."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import tfdist
from tests.harness.deadlines import FAR
from tests.harness.netns import ip, two_hosts
from tests.harness.tiers import exhaustive
from tests.recovery.test_surviving import check
from tests.recovery.test_surviving_pipelines import check as check_pipelines

ROOT = Path(tfdist.__file__).parents[1]


@pytest.fixture
def hosts():
    with two_hosts("off", "10.77.0") as names:
        yield names


def start(
    host: str, workers: list[str], rank: int, folder: Path, behavior: str
) -> subprocess.Popen[str]:
    task = {"type": "worker", "index": rank}
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "TF_CONFIG": json.dumps({"cluster": {"worker": workers}, "task": task}),
        "TFDIST_HOST": host,
        "TFDIST_SECRET": "a secret for this test alone",
        "TFDIST_HEARTBEAT_TIMEOUT": "10",
    }
    inside = "ip", "netns", "exec", host
    return subprocess.Popen(
        [*inside, sys.executable, "-m", "tests.recovery.cut_off", folder, behavior],
        env=environment,
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        text=True,
    )


def cut_off(hosts: list[str], folder: Path, sides: list[int], behavior: str) -> dict[int, Any]:
    """Cuts the network; returns the answers of the ranks that go on, the others' errors checked."""
    workers = [f"10.77.0.{side + 1}:{2222 + rank}" for rank, side in enumerate(sides)]
    ranks = range(len(sides))
    processes = [start(hosts[sides[rank]], workers, rank, folder, behavior) for rank in ranks]
    try:
        deadline = time.monotonic() + FAR
        while len(list(folder.glob("*.waits"))) < len(sides):
            assert all(process.poll() is None for process in processes)
            assert time.monotonic() < deadline
            time.sleep(0.05)
        ip("-n", hosts[0], "link", "set", "eth0", "down")
        (folder / "cut").touch()
        for process in processes:
            process.wait(FAR)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    answers = {rank: pickle.loads((folder / f"{rank}.answer").read_bytes()) for rank in ranks}
    # More than half goes on, or half with rank 0.
    winner = int(2 * sides.count(1) > len(sides))
    for rank in ranks:
        done, said = answers[rank]
        if sides[rank] != winner:
            assert not done
            assert "GroupLostError" in said
            assert "cannot continue" in said
    return {rank: answers[rank] for rank in ranks if sides[rank] == winner}


@exhaustive
@pytest.mark.parametrize("sides", [[0, 1], [0, 0, 1, 1], [0, 1, 1]])
def test_one_side_goes_on(hosts, tmp_path, sides):
    answers = cut_off(hosts, tmp_path, sides, "surviving")
    check(answers, list(answers))


@exhaustive
def test_a_whole_pipeline_goes_on(hosts, tmp_path):
    """Ranks 0 and 1 hold the first stage, 2 and 3 the second."""
    answers = cut_off(hosts, tmp_path, [0, 0, 0, 1], "pipelines")
    check_pipelines(answers, [0, 2])
    done, said = answers[1]
    assert not done and "leaves: too few workers remain" in said


@exhaustive
def test_no_stage_goes_on_alone(hosts, tmp_path):
    answers = cut_off(hosts, tmp_path, [0, 0, 1, 1], "pipelines")
    for done, said in answers.values():
        assert not done and "only lost workers held stage 1 of the model" in said
