"""The network between two hosts breaks in the middle of an all-reduce."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

import tfdist
from tests.cpp.compiling import VARIANTS, Toolchain
from tests.harness.deadlines import FAR
from tests.harness.netns import ip, two_hosts
from tests.harness.tiers import exhaustive, some
from tfdist._src import native
from tfdist._src.options import NativeOptions

pytestmark = [
    pytest.mark.skipif(
        os.geteuid() != 0 or shutil.which("ip") is None,
        reason="network namespaces take root and the command ip",
    ),
    pytest.mark.timeout(1800),  # It may have to compile.
]
HERE = Path(__file__).parent
ROOT = Path(tfdist.__file__).parents[1]
UNAVAILABLE = 3


@pytest.fixture
def hosts() -> Iterator[list[str]]:
    with two_hosts("cut", "10.78.0") as names:
        yield names


@pytest.fixture
def gpus(request: pytest.FixtureRequest) -> dict[str, str]:
    """What stands for a GPU's libraries, and what reduces memory there, by name."""
    core = native.ensure(NativeOptions.from_environment()).core
    folder = request.config.cache.mkdir("csrc-plain")
    toolchain = Toolchain((*VARIANTS["plain"], "-fPIC"), folder, core)
    made = Toolchain(VARIANTS["plain"], folder, core).fakes()
    made["on_gpu"] = toolchain.library(HERE / "on_gpu.cc")
    return {name: str(path) for name, path in made.items()}


def on_gpu(gpus: dict[str, str], way: str, rank: int) -> dict[str, str]:
    return {
        "FAKE_CUDA": gpus["cuda"],
        "FAKE_CUDA_FIRST": str(rank),
        "TFDIST_CUDA_LIBRARY": gpus["cuda"],
        "TFDIST_NCCL_LIBRARY": gpus["nccl"],
        "TFDIST_DEVICE_ALGORITHM": way,
    }


def start(
    host: str, rank: int, *arguments: str, more: dict[str, str] | None = None
) -> subprocess.Popen[str]:
    workers = ["10.78.0.1:2222", "10.78.0.2:2222"]
    task = {"type": "worker", "index": rank}
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "TF_CONFIG": json.dumps({"cluster": {"worker": workers}, "task": task}),
        "TFDIST_SECRET": "a secret for this test alone",
        "TFDIST_HEARTBEAT_TIMEOUT": "3",
        "TFDIST_COLLECTIVE_TIMEOUT": str(FAR),
        "TFDIST_START_TIMEOUT": str(FAR),
        **(more or {}),
    }
    return subprocess.Popen(
        ["ip", "netns", "exec", host, sys.executable, "-m", "tests.cpp.member", *arguments],
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
def test_a_cut_fails_both_sides_in_time(hosts, end):
    native.ensure(NativeOptions.from_environment())
    with started(start(host, rank) for rank, host in enumerate(hosts)) as ranks:
        check(ranks, hosts[end])


@exhaustive
@pytest.mark.parametrize("way", ["host", "nccl"])
def test_a_cut_while_the_tensors_are_on_gpus(hosts, gpus, way):
    processes = (
        start(host, rank, gpus["on_gpu"], more=on_gpu(gpus, way, rank))
        for rank, host in enumerate(hosts)
    )
    with started(processes) as ranks:
        check(ranks, hosts[0])


@contextlib.contextmanager
def started(
    processes: Iterable[subprocess.Popen[str]],
) -> Iterator[list[subprocess.Popen[str]]]:
    """Kills processes at the end, also if a later one does not start."""
    with contextlib.ExitStack() as stack:
        ranks = []
        for rank in processes:
            ranks.append(stack.enter_context(rank))
            stack.callback(rank.kill)
        yield ranks


def check(ranks: list[subprocess.Popen[str]], host: str) -> None:
    """Cuts a host's network off from the ranks, which have started."""
    for rank in ranks:
        until(rank, "RUNNING")
    ip("-n", host, "link", "set", "eth0", "down")
    for number, rank in enumerate(ranks):
        _, code, *words = until(rank, "ERROR")
        message = " ".join(words)
        assert int(code) == UNAVAILABLE, message
        assert f"worker {1 - number} (10.78.0.{2 - number}:2222" in message
        assert "is lost: no sign of life for 3.0 s" in message
        assert "Detected in all_reduce 'x' float32[8388608]" in message
        assert rank.wait() == 0
