"""A job is found by the ID of a process: a worker, or one that has started workers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap

import pytest

from tfdist._src.launch.live import find_job
from tfdist.errors import LaunchError

WORKERS = ["10.0.0.1:8470", "10.0.0.2:8470"]
CONFIG = json.dumps({"cluster": {"worker": WORKERS}, "task": {"type": "worker", "index": 1}})
# A process that does not end by itself tells that it has begun, and waits for its stdin to end.
WAIT = "import sys; print('begun', flush=True); sys.stdin.read()"
START = f"""
    import os, subprocess, sys
    settings = dict(os.environ, TF_CONFIG={CONFIG!r}, TFDIST_SECRET="a = b")
    sys.exit(subprocess.run([sys.executable, "-c", {WAIT!r}], env=settings).returncode)
"""


@pytest.fixture
def begin():
    started = []

    def run(code, **settings):
        environment = {**os.environ, **settings}
        process = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(code)],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        started.append(process)
        assert process.stdout.readline() == b"begun\n"
        return process

    yield run
    for process in started:
        process.communicate()


@pytest.mark.parametrize(
    ("code", "settings"), [(WAIT, {"TF_CONFIG": CONFIG, "TFDIST_SECRET": "a = b"}), (START, {})]
)
def test_a_worker_and_what_has_started_it(begin, code, settings):
    address, environment = find_job(begin(code, **settings).pid)
    assert address == WORKERS[0]
    assert environment["TFDIST_SECRET"] == "a = b"


def test_a_process_in_no_job(begin):
    alone = begin(WAIT, TF_CONFIG="")
    with pytest.raises(LaunchError, match="was not started with a TF_CONFIG of several workers"):
        find_job(alone.pid)
    wrong = begin(WAIT, TF_CONFIG="{")
    with pytest.raises(LaunchError, match=f"environment of process {wrong.pid}: TF_CONFIG is not"):
        find_job(wrong.pid)
    alone.communicate()
    with pytest.raises(LaunchError, match=f"there is no process {alone.pid} on this host"):
        find_job(alone.pid)
