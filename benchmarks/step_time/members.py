"""Processes that sleep until they are asked, each at its own pipe."""

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
    """A worker failed or gave no answer; the message says which and why."""


class Members:
    """Workers, each of which answers what it is sent; an answer that is a text says why it failed.

    Args:
        commands: for each worker its arguments. One more is added: its order as JSON, with the
            number of the file that leads to the driver as `file`.
        orders: for each worker the rest of its order.
        timeout: seconds to wait for an answer.
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
        """Asks all workers at once.

        Returns:
            Their answers, in the workers' order.

        Raises:
            TeamError: a worker failed or gave no answer.
        """
        try:
            for member in self._members:
                member.pipe.send(question)
        except (BrokenPipeError, ConnectionResetError):
            pass  # Its last words are read below.
        waiting = {member.pipe: rank for rank, member in enumerate(self._members)}
        answers = {}
        end = time.monotonic() + self._timeout
        while waiting:
            ready = wait(list(waiting), max(0.0, end - time.monotonic()))
            if not ready:
                ranks = ", ".join(map(str, waiting.values()))
                raise TeamError(f"worker {ranks} gave no answer within {self._timeout:.0f} s")
            # A worker that failed is heard while those that wait for it are silent.
            for pipe in ready:
                rank = waiting.pop(pipe)
                answers[rank] = self._read(rank)
        return [answers[rank] for rank in sorted(answers)]

    def stop(self) -> None:
        """Ends the processes, if they have not been ended yet."""
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
    """One process, its pipe, and what it writes."""

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
                start_new_session=True,  # Ctrl-C is for the driver alone.
            )
        except BaseException:
            self.pipe.close()
            self.log.close()
            raise
        finally:
            theirs.close()

    def last_words(self) -> str:
        """The last lines that it wrote, as one."""
        self.log.seek(0)
        lines = self.log.read().decode(errors="replace").split("\n")
        words = [line.strip() for line in lines if line.strip()]
        return " | ".join(words[-LAST_LINES:])[-MAX_TEXT:] or "without a word"
