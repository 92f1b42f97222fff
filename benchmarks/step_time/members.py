"""Starts worker processes that answer requests of the driver, and sleep between requests.

The driver is the process that runs the benchmark.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection, wait
from typing import IO, Any

from benchmarks.all_reduce.python import ENVIRONMENT

LAST_LINES = 3
MAX_TEXT = 500


class TeamError(Exception):
    """Raised if a worker failed or did not answer.

    The message contains the rank of the worker and the reason.
    """


class Members:
    """Worker processes, each with a pipe through which it receives requests and sends answers.

    If a worker fails, it sends a string with the reason instead of an answer.

    Args:
        commands: for each worker, the program and its arguments. The worker gets one more argument:
            its order, as JSON.
        orders: for each worker, its order: the keyword arguments of the worker's main function.
            The key `file` is added, with the descriptor of the worker's end of the pipe. See
            `serving.serve`.
        timeout: the maximum time to wait for an answer, in seconds.
    """

    def __init__(
        self,
        commands: Sequence[Sequence[str]],
        orders: Sequence[Mapping[str, Any]],
        timeout: float,
    ) -> None:
        self._timeout = timeout
        self._members: list[Member] = []
        try:
            for command, order in zip(commands, orders, strict=True):
                self._members.append(Member(command, order))
        except BaseException:
            self.stop()
            raise

    def ask(self, question: Any) -> list[Any]:
        """Sends a request to all workers, and waits for their answers.

        Returns:
            The answers, ordered by rank.

        Raises:
            TeamError: a worker failed or did not answer.
        """
        try:
            for member in self._members:
                member.pipe.send(question)
        except (BrokenPipeError, ConnectionResetError):
            pass  # The worker has ended. `_read` raises an exception with its last output.
        waiting = {member.pipe: rank for rank, member in enumerate(self._members)}
        answers = {}
        end = time.monotonic() + self._timeout
        while waiting:
            ready = wait(list(waiting), max(0.0, end - time.monotonic()))
            if not ready:
                ranks = ", ".join(map(str, waiting.values()))
                raise TeamError(f"worker {ranks} gave no answer within {self._timeout:.0f} s")
            # The answers are read in the order in which they arrive. If a worker fails, the other
            # workers may wait for it and never answer.
            for pipe in ready:
                rank = waiting.pop(pipe)
                answers[rank] = self._read(rank)
        return [answers[rank] for rank in sorted(answers)]

    def stop(self) -> None:
        """Kills the processes. Does nothing if this method has already been called."""
        for member in self._members:
            member.process.kill()
        for member in self._members:
            member.process.wait()
            member.pipe.close()
            member.log.close()
        self._members = []

    def _read(self, rank: int) -> Any:
        member = self._members[rank]
        try:
            answer = member.pipe.recv()
        except (EOFError, ConnectionResetError):
            code = member.process.wait(5)
            words = member.last_words()
            raise TeamError(f"worker {rank} ended with exit code {code}: {words}") from None
        if isinstance(answer, str):
            raise TeamError(f"worker {rank}: {answer}")
        return answer


class Member:
    """One worker process, the driver's end of its pipe, and the file with its output."""

    def __init__(self, command: Sequence[str], order: Mapping[str, Any]) -> None:
        self.pipe: Connection
        self.pipe, theirs = multiprocessing.Pipe()
        self.log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115
        file = theirs.fileno()
        try:
            self.process = subprocess.Popen(
                [*command, json.dumps({**order, "file": file})],
                env={**os.environ, **ENVIRONMENT},
                stdin=subprocess.DEVNULL,
                stdout=self.log,
                stderr=self.log,
                pass_fds=[file],
                start_new_session=True,  # So that Ctrl-C interrupts only the driver.
            )
        except BaseException:
            self.pipe.close()
            self.log.close()
            raise
        finally:
            theirs.close()

    def last_words(self) -> str:
        """Returns the last lines that the process has written, joined to one line."""
        self.log.seek(0)
        lines = self.log.read().decode(errors="replace").split("\n")
        words = [line.strip() for line in lines if line.strip()]
        return " | ".join(words[-LAST_LINES:])[-MAX_TEXT:] or "without a word"
