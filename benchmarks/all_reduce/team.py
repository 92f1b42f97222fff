"""Runs the ranks of one backend, which wait for commands of the driver.

The driver is the process that runs the benchmark. While a rank waits for a command, it is blocked
in a read and takes no CPU time.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Sequence

from benchmarks.all_reduce.job import Job, Process


class TeamError(Exception):
    """Raised if a rank failed or did not answer.

    The message contains the rank and the reason.
    """


class Team:
    """The ranks of one backend; each has a connection to the driver.

    The driver sends commands to the ranks. A command is one line, and so is the answer:

    - `check BYTES` reduces a vector of this size with known values, and then sets a vector of the
      same size to zero. The answer is the number of wrong elements in the result.
    - `time REPETITIONS` reduces the vector of zeros repeatedly. The answer is the total time in
      seconds.

    If a command fails, the answer is `error` and a message. A rank exits when the driver closes the
    connection.

    Args:
        job: the hosts and files of the ranks.
        processes: the processes to start. One process may start several ranks.
        timeout: the maximum time to wait for an answer, in seconds.
    """

    def __init__(self, job: Job, processes: Sequence[Process], timeout: float) -> None:
        self._timeout = timeout
        self._ranks: dict[int, Connection] = {}
        self._log = job.folder / "stderr"
        self._processes: list[subprocess.Popen[bytes]] = []
        self._size = job.ranks
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(job.control))
        self._listener.listen(job.ranks)
        try:
            with open(self._log, "wb") as log:
                for process in processes:
                    self._processes.append(
                        subprocess.Popen(
                            [*job.hosts.prefix(process.host), *process.command],
                            env={**os.environ, **process.env},
                            stdin=subprocess.DEVNULL,
                            stdout=log,
                            stderr=log,
                            start_new_session=True,  # So that Ctrl-C interrupts only the driver.
                        )
                    )
        except BaseException:
            self.stop()
            raise

    def gather(self) -> None:
        """Waits until all ranks have connected.

        Raises:
            TeamError: a process ended, or a rank did not connect in time.
        """
        end = time.monotonic() + self._timeout
        self._listener.settimeout(0.2)
        while len(self._ranks) < self._size:
            try:
                connection = Connection(self._listener.accept()[0], self._timeout)
                self._ranks[int(connection.ask())] = connection
            except TimeoutError:
                codes = [p.returncode for p in self._processes if p.poll() is not None]
                if codes:
                    raise TeamError(
                        f"a rank ended with exit code {codes[0]}: {self._last_words()}"
                    ) from None
                if time.monotonic() > end:
                    missing = sorted(set(range(self._size)) - set(self._ranks))
                    raise TeamError(
                        f"ranks {missing} did not start within {self._timeout:.0f} s: "
                        f"{self._last_words()}"
                    ) from None
        self._listener.close()

    def measure(self, size: int, repetitions: int) -> tuple[float, int]:
        """Checks the result of one reduction, and then times several reductions.

        Args:
            size: the number of bytes to reduce.
            repetitions: the number of timed reductions.

        Returns:
            The time of one reduction on the slowest rank, in seconds; and the total number of wrong
            elements on all ranks.

        Raises:
            TeamError: a rank failed or did not answer.
        """
        wrong = sum(map(int, self._ask(f"check {size}")))
        return max(map(float, self._ask(f"time {repetitions}"))) / repetitions, wrong

    def stop(self) -> None:
        """Closes the connections, so that the ranks exit; ends processes that are still running.

        Processes that do not exit within 5 seconds get SIGTERM, and after 5 more seconds SIGKILL.
        """
        self._listener.close()
        for connection in self._ranks.values():
            connection.close()
        for end in (None, signal.SIGTERM, signal.SIGKILL):
            for process in self._processes:
                if end and process.poll() is None:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(process.pid, end)
            limit = time.monotonic() + 5
            for process in self._processes:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(max(0.0, limit - time.monotonic()))

    def _ask(self, command: str) -> list[str]:
        with contextlib.suppress(OSError):  # If a rank has ended, `ask` fails below.
            for connection in self._ranks.values():
                connection.tell(command)
        answers = []
        for rank, connection in sorted(self._ranks.items()):
            try:
                answers.append(connection.ask())
            except TimeoutError:
                raise TeamError(
                    f"rank {rank} gave no answer to {command!r} within {self._timeout:.0f} s"
                ) from None
            except ConnectionError as error:
                raise TeamError(f"rank {rank}: {error}: {self._last_words()}") from None
            if answers[-1].startswith("error"):
                raise TeamError(f"rank {rank}: {answers[-1].removeprefix('error ')}")
        return answers

    def _last_words(self) -> str:
        text = self._log.read_text(errors="replace")
        lines = [line.strip() for line in text.splitlines() if line.strip(" -*\t")]
        return lines[-1] if lines else "without a word"


class Connection:
    """The connection of the driver to one rank."""

    def __init__(self, connected: socket.socket, timeout: float) -> None:
        connected.settimeout(timeout)
        self._socket = connected
        self._lines = connected.makefile("r")

    def tell(self, line: str) -> None:
        self._socket.sendall(f"{line}\n".encode())

    def ask(self) -> str:
        """Waits for the next line from the rank, and returns it.

        Raises:
            ConnectionError: the rank has closed the connection, or has ended.
            TimeoutError: no line arrived in time.
        """
        line = self._lines.readline()
        if not line.endswith("\n"):
            raise ConnectionError("it ended")
        return line.strip()

    def close(self) -> None:
        self._lines.close()
        self._socket.close()
