"""Jobs for the tests: real launchers whose workers are small scripts without TensorFlow."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import tfdist
from tests.harness.deadlines import FAR

ROOT = str(Path(tfdist.__file__).parents[1])
MARK = "LAUNCH_TEST_MARK"
PRELUDE = """
import json, os, signal, subprocess, sys, time
from pathlib import Path
config = json.loads(os.environ["TF_CONFIG"])
rank = config["task"]["index"]
here = Path(os.environ["LAUNCH_TEST_FOLDER"])
def until(condition):
    while not condition():
        time.sleep(0.01)
def ready():
    (here / f"pid-{rank}").write_text(str(os.getpid()))
    (here / f"ready-{rank}").touch()
def wait_for(*ranks):
    until(lambda: all((here / f"ready-{other}").exists() for other in ranks))
def wait_gone(*ranks):  # until launchers have taken note of their ends
    wait_for(*ranks)
    pids = [(here / f"pid-{other}").read_text() for other in ranks]
    until(lambda: not any(Path("/proc", pid).exists() for pid in pids))
def stay():  # until a signal comes
    while True:
        signal.pause()
"""
# A launcher with other numbers of seconds: `module.NAME` -> the value.
OTHER_SECONDS = """
import importlib, json, sys
from tfdist._src.launch.cli import main
for name, value in json.loads(sys.argv[1]).items():
    module, constant = name.rsplit(".", 1)
    setattr(importlib.import_module(f"tfdist._src.launch.{module}"), constant, value)
sys.exit(main(["run", *sys.argv[2:]]))
"""
# It waits for the cause of a failure as long as it takes.
PATIENT = {"restart_all._CAUSE_SECONDS": FAR, "restart_all._HOST_0_SECONDS": FAR}


class Job:
    """A launcher and everything it starts, found by a mark in the environment."""

    def __init__(self, folder: Path, command: list[str], environment: dict[str, str]) -> None:
        self.folder = folder
        self.mark = uuid.uuid4().hex
        self._out = folder / f"out-{self.mark}"
        self._err = folder / f"err-{self.mark}"
        with self._out.open("wb") as out, self._err.open("wb") as err:
            self.process = subprocess.Popen(
                command,
                env={**environment, MARK: self.mark},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )

    @property
    def out(self) -> str:
        return self._out.read_text()

    @property
    def err(self) -> str:
        return self._err.read_text()

    def wait(self) -> int:
        return self.process.wait()

    def wait_ready(self, count: int) -> None:
        until(lambda: len(list(self.folder.glob("ready-*"))) >= count)

    def wait_err(self, text: str) -> None:
        until(lambda: text in self.err)

    def processes(self) -> set[int]:
        """All running processes of the job but the launcher."""
        return marked(self.mark) - {self.process.pid}

    def wait_gone(self) -> None:
        until(lambda: not self.processes())

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        for pid in marked(self.mark):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def until(condition: Callable[[], bool]) -> None:
    while not condition():
        time.sleep(0.02)


def marked(mark: str) -> set[int]:
    """The processes whose environment holds the mark; zombies have none."""
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                if f"{MARK}={mark}".encode() in (entry / "environ").read_bytes():
                    found.add(int(entry.name))
            except OSError:
                continue
    return found


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """What the launchers inherit: nothing that would change what they do."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    kept = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    return {
        **kept,
        "PYTHONPATH": ROOT,
        "LAUNCH_TEST_FOLDER": str(tmp_path),
        "TMPDIR": str(temporary),
        "CUDA_VISIBLE_DEVICES": "",
        # Compiling is tested elsewhere.
        "TFDIST_NATIVE": "0",
    }


@pytest.fixture
def script(tmp_path: Path) -> Callable[[str], str]:
    """Writes a worker's script, which begins with PRELUDE."""

    def write(body: str, name: str = "train.py") -> str:
        path = tmp_path / name
        path.write_text(PRELUDE + textwrap.dedent(body))
        return str(path)

    return write


@pytest.fixture
def launch(tmp_path: Path, environment: dict[str, str]) -> Iterator[Callable[..., Job]]:
    """Starts `tfdist run` with these arguments."""
    jobs: list[Job] = []

    def start(*arguments: str, seconds: dict[str, float] | None = None, **settings: str) -> Job:
        how = ["-c", OTHER_SECONDS, json.dumps(seconds)] if seconds else ["-m", "tfdist", "run"]
        command = [sys.executable, *how, *arguments]
        jobs.append(Job(tmp_path, command, {**environment, **settings}))
        return jobs[-1]

    yield start
    for job in jobs:
        job.end()
