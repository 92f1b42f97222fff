"""Stopping a job, gently or not: nothing stays behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.harness.deadlines import FAR
from tests.harness.tiers import some

from .conftest import until

# Each worker has a child of its own, as a data loader has; the body decides what signals do.
FAMILY = """
child = subprocess.Popen([sys.executable, "-c", CHILD])
"""
SLEEPER = 'CHILD = "import time; time.sleep(3600)"'
STUBBORN = (
    'CHILD = "import signal, time; [signal.signal(n, signal.SIG_IGN) for n in (2, 15)]; '
    'time.sleep(3600)"\n'
    "[signal.signal(n, signal.SIG_IGN) for n in (signal.SIGINT, signal.SIGTERM)]"
)
WAIT = """
ready()
stay()
"""
POLITE = """
def end(number, frame):
    (here / f"got-{rank}-{signal.Signals(number).name}").touch()
    sys.exit(0)
signal.signal(signal.SIGINT, end)
signal.signal(signal.SIGTERM, end)
"""


def body(*parts):
    return "\n".join(parts)


@pytest.mark.parametrize(
    ("number", "code", "received"),
    [
        (signal.SIGINT, 130, "SIGINT"),
        (signal.SIGTERM, 143, "SIGTERM"),
        (signal.SIGHUP, 129, "SIGTERM"),
    ],
)
def test_a_signal_asks_all_workers(launch, script, tmp_path, number, code, received):
    job = launch("-n", "3", "--grace", str(FAR), script(body(SLEEPER, FAMILY, POLITE, WAIT)))
    job.wait_ready(3)
    job.process.send_signal(number)
    assert job.wait() == code
    assert {path.name for path in tmp_path.glob("got-*")} == {
        f"got-{rank}-{received}" for rank in range(3)
    }
    assert f"this command was stopped by {number.name}." in job.err
    assert job.processes() == set()


def test_workers_that_ignore_signals_are_killed_after_the_grace(launch, script):
    job = launch("-n", "2", "--grace", "0.5", script(body(STUBBORN, FAMILY, WAIT)))
    job.wait_ready(2)
    start = time.monotonic()
    job.process.send_signal(signal.SIGINT)
    assert job.wait() == 130
    assert time.monotonic() - start > 0.9
    assert job.processes() == set()


def test_a_second_ctrl_c_kills_at_once(launch, script):
    hearing = "signal.signal(signal.SIGINT, lambda *_: (here / f'heard-{rank}').touch())"
    job = launch("-n", "2", "--grace", str(FAR), script(body(STUBBORN, hearing, FAMILY, WAIT)))
    job.wait_ready(2)
    job.process.send_signal(signal.SIGINT)
    until(lambda: len(list(job.folder.glob("heard-*"))) == 2)
    assert job.process.poll() is None
    job.process.send_signal(signal.SIGINT)
    assert job.wait() == 130
    assert job.processes() == set()


def test_a_failure_stops_workers_that_ignore_sigterm(launch, script):
    job = launch(
        "-n",
        "3",
        "--grace",
        "0.5",
        script(body(STUBBORN, FAMILY, "if rank == 1: wait_for(0, 2); sys.exit(3)", WAIT)),
    )
    job.wait_ready(2)
    assert job.wait() == 3
    assert job.processes() == set()


def test_ctrl_c_while_a_failure_is_stopped_kills_and_keeps_the_failure(launch, script):
    job = launch(
        "-n",
        "2",
        "--grace",
        str(FAR),
        script(body(STUBBORN, FAMILY, "if rank == 1: wait_for(0); sys.exit(3)", WAIT)),
    )
    job.wait_err("Stopping the other workers")
    job.process.send_signal(signal.SIGINT)
    assert job.wait() == 3


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGQUIT, signal.SIGSEGV])
def test_the_launchers_own_death_leaves_nothing(launch, script, number):
    job = launch("-n", "3", script(body(STUBBORN, FAMILY, WAIT)))
    job.wait_ready(3)
    assert len(job.processes()) >= 6
    job.process.send_signal(number)
    assert job.wait() == -number
    job.wait_gone()


def test_death_with_the_whole_process_group(launch, script):
    """As `kill -9 %1` does in a shell."""
    job = launch("-n", "2", script(body(STUBBORN, FAMILY, WAIT)))
    job.wait_ready(2)
    os.killpg(job.process.pid, signal.SIGKILL)
    job.wait_gone()


@pytest.mark.parametrize("delay", some(range(0, 200, 10), always=[40, 80, 120]))
def test_death_while_the_workers_start(launch, script, delay):
    """However early it comes: no worker is ever started unwatched."""
    job = launch("-n", "4", script(body(STUBBORN, WAIT)))
    time.sleep(delay / 1000)
    job.process.kill()
    job.process.wait()
    job.wait_gone()


def test_a_group_that_has_ended_is_not_killed_later(environment):
    """The watchdog forgets a worker that has ended, since its number may be used again."""
    program = """
import os, subprocess, time
from tfdist._src.launch.job.worker import Watchdog
watchdog = Watchdog()
ended, running = (
    subprocess.Popen(["sleep", "3600"], start_new_session=True, stdout=subprocess.DEVNULL,
                     preexec_fn=watchdog.add_this_process).pid for _ in range(2))
watchdog.remove(ended)
print(ended, running)
"""
    command = [sys.executable, "-c", program]
    ended, running = map(int, subprocess.check_output(command, env=environment).split())
    try:
        until(lambda: not _runs(running))
        assert _runs(ended)
    finally:
        os.kill(ended, signal.SIGKILL)


def _runs(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")")[1].split()[0] != "Z"
    except OSError:
        return False


def test_a_signal_that_was_ignored_at_the_start_stays_ignored(launch, script, environment):
    path = script("ready()\nwait_for(5)\nprint('end')")
    process = subprocess.Popen(
        ["nohup", sys.executable, "-m", "tfdist", "run", "-n", "1", path],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    folder = Path(environment["LAUNCH_TEST_FOLDER"])
    until((folder / "ready-0").exists)
    process.send_signal(signal.SIGHUP)
    time.sleep(0.3)  # in which it would do harm
    (folder / "ready-5").touch()
    assert process.communicate() == ("end\n", None)
    assert process.returncode == 0


def test_the_log_folder_is_kept_when_a_job_is_stopped(launch, script):
    job = launch("-n", "2", script(body("print('so far', rank)", WAIT)))
    job.wait_ready(2)
    job.process.send_signal(signal.SIGTERM)
    assert job.wait() == 143
    folder = Path(re.search(r"Worker logs on this host: (\S+)", job.err)[1])
    assert (folder / "worker-1.log").read_text() == "so far 1\n"
