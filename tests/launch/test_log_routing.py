"""Where the output goes: the terminal, prefixed lines, log files."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness.tiers import exhaustive
from tfdist._src.launch.job.log_routing import ShownOutput

TALK = """
print("out", rank)
print("err", rank, file=sys.stderr)
"""


def logs(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.iterdir()}


def test_chief_only_by_default(launch, script, tmp_path):
    job = launch("-n", "3", "--log-dir", str(tmp_path / "new" / "logs"), script(TALK))
    assert job.wait() == 0
    assert (job.out, job.err) == ("out 0\n", "err 0\n")
    assert logs(tmp_path / "new" / "logs") == {
        "worker-1.log": "out 1\nerr 1\n",
        "worker-2.log": "out 2\nerr 2\n",
    }


def test_output_none_leaves_only_log_files(launch, script, tmp_path):
    job = launch("-n", "2", "--output", "none", "--log-dir", str(tmp_path / "logs"), script(TALK))
    assert job.wait() == 0
    assert (job.out, job.err) == ("", "")
    assert logs(tmp_path / "logs") == {
        "worker-0.log": "out 0\nerr 0\n",
        "worker-1.log": "out 1\nerr 1\n",
    }


def test_none_shows_the_failure_of_the_chief(launch, script):
    job = launch("-n", "2", "--output", "none", script("sys.exit('no data') if rank == 0 else 0"))
    assert job.wait() == 1
    assert job.out == ""
    assert "worker 0 failed with exit code 1. Last lines of its output:\n  | no data" in job.err


def test_output_all_prefixes_the_lines_of_other_workers(launch, script, tmp_path):
    job = launch("-n", "3", "--output", "all", "--log-dir", str(tmp_path / "logs"), script(TALK))
    assert job.wait() == 0
    assert sorted(job.out.splitlines()) == [
        "[1] err 1",
        "[1] out 1",
        "[2] err 2",
        "[2] out 2",
        "out 0",
    ]
    assert job.err == "err 0\n"
    assert set(logs(tmp_path / "logs")) == {"worker-1.log", "worker-2.log"}


def test_all_keeps_lines_whole(launch, script):
    """Two workers write pieces of lines at the same time."""
    job = launch(
        "-n",
        "3",
        "--output",
        "all",
        script("""
            if rank:
                for number in range(300):
                    sys.stdout.write(f"{number:03} ")
                    sys.stdout.write(str(rank) * 2000)
                    sys.stdout.write("\\n" if number < 299 else "")
        """),
    )
    assert job.wait() == 0
    lines = job.out.splitlines()
    for rank in ("1", "2"):
        own = [line for line in lines if line.startswith(f"[{rank}] ")]
        assert own == [f"[{rank}] {number:03} {rank * 2000}" for number in range(300)]
    assert len(lines) == 600


def test_all_shows_the_last_lines_of_a_failure(launch, script):
    job = launch("-n", "2", "--output", "all", script("if rank: sys.exit('no data')\nstay()"))
    assert job.wait() == 1
    assert job.out == "[1] no data\n"
    assert "  | no data" in job.err


def test_all_does_not_wait_for_a_process_that_left_the_group(launch, script):
    job = launch(
        "-n",
        "2",
        "--output",
        "all",
        script("""
            if rank:
                subprocess.Popen(
                    [sys.executable, "-c", "import time; time.sleep(3600)"], start_new_session=True)
                print("left", end="")
        """),
    )
    assert job.wait() == 0
    assert job.out == "[1] left\n"


def test_a_reader_that_goes_away_ends_nothing(environment, script, tmp_path):
    path = script("for n in range(3000 * rank): print('line', n)\nready()")
    process = subprocess.Popen(
        [sys.executable, "-m", "tfdist", "run", "-n", "2", "--output", "all", path],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    process.stdout.readline()
    process.stdout.close()
    error = process.stderr.read()
    process.stderr.close()
    assert process.wait() == 0, error
    assert (tmp_path / "ready-1").exists()


def test_old_logs_are_overwritten(launch, script, tmp_path):
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "worker-1.log").write_text("older\n" * 100)
    assert launch("-n", "2", "--log-dir", str(tmp_path / "logs"), script(TALK)).wait() == 0
    assert logs(tmp_path / "logs") == {"worker-1.log": "out 1\nerr 1\n"}


def test_a_folder_that_cannot_be_made(launch, script, tmp_path):
    (tmp_path / "file").touch()
    job = launch("-n", "2", "--log-dir", str(tmp_path / "file" / "logs"), script(TALK))
    assert job.wait() == 1
    assert job.err.startswith("tfdist run: error: the directory for worker output")
    assert job.err.count("\n") == 1
    assert "--log-dir" in job.err


def test_a_log_that_cannot_be_written(launch, script, tmp_path):
    """The second worker cannot be started: the first is not left alone."""
    (tmp_path / "worker-1.log").mkdir()
    job = launch("-n", "2", "--log-dir", str(tmp_path), script("stay()"))
    assert job.wait() == 1
    assert "the output of worker 1 cannot be written" in job.err
    assert job.err.count("\n") == 1
    assert job.processes() == set()


@pytest.fixture
def pipe():
    """A pipe that others write to as well, and its reader."""
    read, write = os.pipe()
    os.set_blocking(read, False)
    yield read, write
    for descriptor in (read, write):
        with contextlib.suppress(OSError):
            os.close(descriptor)


def read_all(descriptor: int) -> bytes:
    found = b""
    with contextlib.suppress(BlockingIOError):
        while data := os.read(descriptor, 65536):
            found += data
    return found


def test_lines_wait_for_a_reader_and_the_launcher_does_not(pipe):
    read, write = pipe
    shown = ShownOutput(write)
    line = b"x" * 1500 + b"\n"
    for _ in range(100):
        shown.write(line)
    assert shown.is_behind and os.get_blocking(write)
    found = [read_all(read)]
    while shown.is_behind:
        shown.advance()
        found.append(read_all(read))
    assert b"".join(found) == line * 100
    assert all(part.endswith(b"\n") for part in found)  # nobody else's text is within a line
    shown.write(b"y" * 10_000 + b"\n")  # a line that is too long for one call
    assert read_all(read) == b"y" * 10_000 + b"\n"


def test_lines_without_a_reader_are_forgotten(pipe):
    read, write = pipe
    shown = ShownOutput(write)
    shown.write(b"x\n" * 100_000)
    assert shown.is_behind
    os.close(read)
    shown.finish()
    assert not shown.is_behind


@exhaustive
@pytest.mark.parametrize("elastic", [False, True])
def test_a_reader_that_stops_does_not_stop_the_launcher(script, environment, elastic):
    path = script("""
        ready()
        if rank == 1:
            os.set_blocking(1, False)
            full = 0
            while full < 25:
                try:
                    os.write(1, b"line\\n" * 100)
                    full = 0
                except BlockingIOError:
                    full += 1
                    time.sleep(0.02)
            (here / "ready-9").touch()
            stay()
        if rank == 2:
            wait_for(9)
            sys.exit(7)
        if rank == 0:
            stay()
    """)
    options = ["--elastic", "--spares", "0", "--max-restarts", "0"] if elastic else []
    command = [sys.executable, "-m", "tfdist", "run", "-n", "3", "--output", "all", *options, path]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, env=environment, **pipes) as job:
        try:
            for line in job.stderr:
                if b"worker 2 failed with exit code 7" in line:
                    break
            else:
                raise AssertionError("the launcher has ended")
            if elastic:
                job.send_signal(signal.SIGINT)
            out = job.stdout.read()
            assert job.wait() == (130 if elastic else 7)
        finally:
            job.kill()
    assert out.startswith(b"[1] line\n" * 1000)
