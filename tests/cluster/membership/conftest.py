"""Workers that form new groups, as processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

from tests.cluster.conftest import ROOT, Process, tf_config
from tests.harness.deadlines import FAR

COMMAND = (sys.executable, "-m", "tests.cluster.membership.worker")


@pytest.fixture
def start() -> Iterator[Callable[..., Process]]:
    """Starts one worker."""
    processes: list[Process] = []

    def begin(
        cluster: list[str], index: int, prefix: tuple[str, ...] = (), **environment: str
    ) -> Process:
        process = Process(
            [*prefix, *COMMAND],
            cwd=ROOT,
            env={
                **os.environ,
                "PYTHONPATH": ROOT,
                "TF_CONFIG": tf_config(cluster, index),
                "TFDIST_START_TIMEOUT": str(FAR),
                **environment,
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        processes.append(process)
        return process

    yield begin
    for process in processes:
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


@pytest.fixture
def group(
    addresses: Callable[[int], list[str]], start: Callable[..., Process]
) -> Callable[..., tuple[list[str], list[Process]]]:
    """Starts workers that have met; `special` sets more variables of some."""

    def begin(
        count: int, special: dict[int, dict[str, str]] | None = None, **environment: str
    ) -> tuple[list[str], list[Process]]:
        cluster = addresses(count)
        own = special or {}
        workers = [start(cluster, i, **environment, **own.get(i, {})) for i in range(count)]
        for worker in workers:
            worker.until("met")
        return cluster, workers

    return begin


@pytest.fixture
def child():
    """A process that waits, and is not waited for: killed, it remains as a zombie."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield process
    process.kill()
    process.wait()
    process.stdin.close()
