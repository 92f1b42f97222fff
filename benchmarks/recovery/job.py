"""Runs a job, reads the notes of its workers, and kills all its processes at the end.

The notes of a worker are a file with its events; see `marks`.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import select
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from benchmarks.all_reduce.python import ENVIRONMENT
from benchmarks.recovery.marks import parse
from benchmarks.recovery.timeline import Life
from benchmarks.step_time.members import LAST_LINES, MAX_TEXT, TeamError

T = TypeVar("T")
# All processes of a job inherit this environment variable from the launcher. So they can be found
# even if the launcher has ended.
TOKEN = "RECOVERY_BENCHMARK_JOB"
LOOK = 0.005  # Seconds between two reads of the notes.
KILLED = 30.0  # Maximum seconds in which `stop` waits for the end of all processes.


class Job:
    """A running job: its launcher, and the notes of its workers.

    Args:
        command: the command that starts the launcher.
        notes: the folder with the notes of all workers.
        environment: additional environment variables for all processes.
    """

    def __init__(self, command: Sequence[str], notes: str, environment: Mapping[str, str]) -> None:
        self.lives: dict[int, Life] = {}
        self._notes = Path(notes)
        self._token = f"{TOKEN}={secrets.token_hex(8)}"
        self._handles: dict[int, int] = {}
        self._log = tempfile.TemporaryFile()  # noqa: SIM115
        name, _, value = self._token.partition("=")
        self._launcher = subprocess.Popen(
            command,
            env={**os.environ, **ENVIRONMENT, **environment, name: value},
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            start_new_session=True,  # So that Ctrl-C interrupts only the driver.
        )

    def wait(self, find: Callable[[Mapping[int, Life]], T | None], timeout: float) -> T:
        """Reads the notes repeatedly until a function finds a result in them.

        Args:
            find: a function that takes the events of all workers, by process ID. It returns the
                result, or None if the result is not known yet.
            timeout: the maximum time to wait, in seconds.

        Returns:
            The result.

        Raises:
            TeamError: the job has ended, or the timeout has passed.
        """
        end = time.monotonic() + timeout
        while True:
            ended = self._launcher.poll()
            self._look()
            if (found := find(self.lives)) is not None:
                return found
            if ended is not None:
                raise TeamError(f"the job ended with exit code {ended}: {self._last_words()}")
            if time.monotonic() > end:
                raise TeamError(f"it took more than {timeout:.0f} s: {self._last_words()}")
            time.sleep(LOOK)

    def signal(self, process: int, number: signal.Signals) -> float:
        """Sends a signal to a worker.

        Args:
            process: the process ID of the worker.
            number: the signal.

        Returns:
            The time of the signal, on the same clock as the times in the notes.
        """
        now = time.monotonic()
        signal.pidfd_send_signal(self._handles[process], number)
        return now

    def stop(self) -> None:
        """Kills all processes of the job."""
        self._launcher.kill()
        self._launcher.wait()
        for handle in self._handles.values():
            os.close(handle)
        self._handles = {}
        end = time.monotonic() + KILLED
        while (left := processes_with(self._token)) and time.monotonic() < end:
            for process in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            time.sleep(LOOK)
        self._log.close()

    def _look(self) -> None:
        for path in self._notes.iterdir():
            process = int(path.name)
            ended = self.lives[process].ended if process in self.lives else None
            if process not in self._handles and ended is None:
                try:
                    self._handles[process] = os.pidfd_open(process)
                except ProcessLookupError:
                    ended = time.monotonic()
            elif ended is None and select.select([self._handles[process]], [], [], 0)[0]:
                ended = time.monotonic()
            marks = parse(path.read_text())
            if marks:
                self.lives[process] = Life(marks, ended)

    def _last_words(self) -> str:
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").split("\n")
        words = [line.strip() for line in lines if line.strip()]
        # The last lines of torchrun are a summary. So this also searches for the last exception.
        error = re.compile(r"(\[rank\d+\]: )?\w*(Error|Exception): ")
        causes = [line for line in words if error.match(line)]
        return " | ".join([*causes[-1:], *words[-LAST_LINES:]])[:MAX_TEXT] or "without a word"


def processes_with(variable: str) -> list[int]:
    """Returns the IDs of all processes, except zombies, with a certain environment variable.

    Args:
        variable: the variable and its value, as `NAME=VALUE`.
    """
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if variable.encode() in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
        except (OSError, ValueError):
            pass  # The process has ended, or belongs to another user.
    return found
