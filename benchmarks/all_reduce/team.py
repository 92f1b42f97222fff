"""The ranks of one backend, which are started once and sleep in a read between commands."""

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
    """A rank failed or did not answer; the message names the rank and the reason."""


class Team:
    """Ranks that wait for commands, each on its own connection to the driver.

    A command is a line. `check BYTES` reduces known values, and leaves a buffer of zeros; the
    answer is the number of wrong elements. `time REPETITIONS` reduces this buffer repeatedly; the
    answer is the total seconds. If a command fails, the answer is `error` and a message. A rank
    exits when its connection ends.

    Args:
        job: the hosts and files of the ranks.
        processes: the processes to start; a process may start several ranks.
        timeout: seconds to wait for an answer.
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
                            start_new_session=True,  # Ctrl-C must reach only the driver.
                        )
                    )
        except BaseException:
            self.stop()
            raise

    def gather(self) -> None:
        """Waits until all ranks have connected.

        Raises:
            TeamError: a process ended, or the ranks did not connect in time.
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
        """Checks one reduction, and times several.

        Args:
            size: the number of bytes to reduce.
            repetitions: the number of timed reductions.

        Returns:
            The seconds per reduction on the slowest rank, and the number of wrong elements on all
            ranks.

        Raises:
            TeamError: a rank failed or did not answer.
        """
        wrong = sum(map(int, self._ask(f"check {size}")))
        return max(map(float, self._ask(f"time {repetitions}"))) / repetitions, wrong

    def stop(self) -> None:
        """Closes the connections, so that the ranks exit; terminates or kills remaining ranks."""
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
        with contextlib.suppress(OSError):  # The rank's last output is read below.
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
    """Lines to and from one rank."""

    def __init__(self, connected: socket.socket, timeout: float) -> None:
        connected.settimeout(timeout)
        self._socket = connected
        self._lines = connected.makefile("r")

    def tell(self, line: str) -> None:
        self._socket.sendall(f"{line}\n".encode())

    def ask(self) -> str:
        """Returns the next line.

        Raises:
            ConnectionError: the rank is gone.
            TimeoutError: no line arrived in time.
        """
        line = self._lines.readline()
        if not line.endswith("\n"):
            raise ConnectionError("it ended")
        return line.strip()

    def close(self) -> None:
        self._lines.close()
        self._socket.close()
