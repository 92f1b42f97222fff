"""The chief at a terminal: its output comes through byte for byte."""

from __future__ import annotations

import errno
import os
import pty
import select
import signal
import subprocess
import sys

import pytest

BAR = r"""
assert sys.stdout.isatty() == (rank == 0)
assert sys.stderr.isatty() == (rank == 0)
for step in range(50):
    sys.stdout.write(f"\r{step}/50 [{'=' * (step // 5):<10}]")
    time.sleep(0.002)
sys.stdout.write("\r\x1b[1m50/50\x1b[0m done\n\tnot a line")
print("on stderr", file=sys.stderr)
"""


def at_terminal(command, environment, *, feed=b"", act=None):
    """Runs a command at a pseudo-terminal; returns its exit code and all that was shown."""
    master, slave = pty.openpty()
    process = subprocess.Popen(
        command,
        stdin=slave,
        stdout=slave,
        stderr=slave,
        env=environment,
        start_new_session=True,
        preexec_fn=lambda: os.close(os.open(os.ttyname(0), os.O_RDWR)),  # the controlling one
    )
    os.close(slave)
    os.write(master, feed)
    shown = b""
    while True:
        if not select.select([master], [], [], 0.1)[0]:
            continue
        try:
            data = os.read(master, 65536)
        except OSError as error:
            assert error.errno == errno.EIO  # every process has closed it
            break
        shown += data
        if act is not None:
            act(shown, master)
    os.close(master)
    return process.wait(), shown


def run(*arguments):
    return [sys.executable, "-m", "tfdist", "run", *arguments]


@pytest.mark.parametrize("output", ["chief", "all"])
def test_a_progress_bar_comes_through_byte_for_byte(environment, script, output):
    path = script(BAR)
    alone = {**environment, "TF_CONFIG": '{"task": {"index": 0}}'}
    expected = at_terminal([sys.executable, "-u", path], alone)
    quiet = script("assert not sys.stdout.isatty()", "quiet.py")
    wrapper = script(
        f"import runpy\nrunpy.run_path({path!r} if rank == 0 else {quiet!r})", "main.py"
    )
    assert expected[0] == 0
    assert expected[1].count(b"\r") > 50
    assert at_terminal(run("-n", "2", "--output", output, wrapper), environment) == expected


def test_the_chief_reads_the_terminal(environment, script):
    path = script("if rank == 0: print('got', input())\nelse: assert sys.stdin.read() == ''")
    code, shown = at_terminal(run("-n", "2", path), environment, feed=b"hello\n")
    assert code == 0
    assert b"got hello" in shown


def test_ctrl_c_at_the_terminal(environment, script):
    path = script(
        """
        try:
            ready()
            wait_for(0, 1)
            if rank == 0: print("running", flush=True)
            stay()
        except KeyboardInterrupt:
            if rank == 0: print("asked once", flush=True)
            sys.exit(0)
        """
    )
    pressed = []

    def press(shown, master):
        if b"running" in shown and not pressed:
            pressed.append(True)
            os.write(master, b"\x03")

    code, shown = at_terminal(run("-n", "2", path), environment, act=press)
    assert code == 128 + signal.SIGINT
    assert shown.count(b"asked once") == 1
    assert b"this command was stopped by SIGINT" in shown
    assert b"Traceback" not in shown
