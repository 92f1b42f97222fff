"""The network between two hosts breaks in the middle of an all-reduce."""

from __future__ import annotations

import contextlib
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
from tests.netns import ip, two_hosts
from tests.tiers import some
from tfdist import native
from tfdist.options import NativeOptions

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("ip") is None,
    reason="network namespaces take root and the command ip",
)
ROOT = Path(tfdist.__file__).parents[1]
UNAVAILABLE = 3


@pytest.fixture
def hosts() -> Iterator[list[str]]:
    with two_hosts("cut", "10.78.0") as names:
        yield names


def start(host: str, rank: int) -> subprocess.Popen[str]:
    workers = ["10.78.0.1:2222", "10.78.0.2:2222"]
    task = {"type": "worker", "index": rank}
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "TF_CONFIG": json.dumps({"cluster": {"worker": workers}, "task": task}),
        "TFDIST_SECRET": "a secret for this test alone",
        "TFDIST_LINK_TIMEOUT": "3",
        "TFDIST_COLLECTIVE_TIMEOUT": str(FAR),
        "TFDIST_START_TIMEOUT": str(FAR),
    }
    return subprocess.Popen(
        ["ip", "netns", "exec", host, sys.executable, "-m", "tests.csrc.member"],
        env=environment,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def until(process: subprocess.Popen[str], word: str) -> list[str]:
    output = []
    for line in process.stdout:
        output.append(line)
        if line.startswith(word):
            return line.split(" ")
    raise AssertionError("".join(output))


@pytest.mark.parametrize("end", some([0, 1], always=[0]))
def test_a_cut_fails_both_sides_within_the_link_timeout(hosts, end):
    native.ensure(NativeOptions.from_environment())
    with contextlib.ExitStack() as stack:
        ranks = [stack.enter_context(start(host, rank)) for rank, host in enumerate(hosts)]
        for rank in ranks:
            stack.callback(rank.kill)
        for rank in ranks:
            until(rank, "RUNNING")
        ip("-n", hosts[end], "link", "set", "eth0", "down")
        for number, rank in enumerate(ranks):
            _, code, *words = until(rank, "ERROR")
            message = " ".join(words)
            assert int(code) == UNAVAILABLE, message
            assert f"worker {1 - number} (10.78.0.{2 - number}:2222" in message
            assert "is lost: no sign of life for 3.0 s" in message
            assert "It was noticed in all_reduce 'x' float32[8388608]" in message
            assert rank.wait() == 0
