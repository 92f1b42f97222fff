"""The processes of one backend, started once and asked for some steps at a time."""

from __future__ import annotations

import json
import multiprocessing
import os
import socket
import subprocess
import sys
import tempfile
import time
from multiprocessing.connection import wait

from reducing.python import ENVIRONMENT

from stepping.backends import BACKENDS, find_python


class TeamError(Exception):
    """A worker failed or gave no answer; the message says which and why."""


class Team:
    """Workers of one backend that sleep until they are asked for steps.

    Args:
        backend: a key of `BACKENDS`.
        model: a key of `MODELS`.
        workers: how many processes; worker i runs on core i alone, with one thread to compute.
        torch_python: a Python that has torch, where the backend takes one.
        timeout: seconds to wait for an answer.

    Raises:
        MissingError: the backend cannot run here.
    """

    def __init__(
        self,
        backend: str,
        model: str,
        workers: int,
        torch_python: str = sys.executable,
        timeout: float = 180.0,
    ) -> None:
        python = find_python(backend, sys.executable, torch_python)
        connected = BACKENDS[backend].connected and workers > 1
        addresses = free_addresses(workers) if connected else []
        self._timeout = timeout
        self._log = tempfile.TemporaryFile()  # noqa: SIM115
        self._members = []
        for rank in range(workers):
            ours, theirs = multiprocessing.Pipe()
            file = theirs.fileno()
            order = {"backend": backend, "model": model, "rank": rank, "addresses": addresses}
            process = subprocess.Popen(
                [python, "-m", "stepping.worker", json.dumps(order | {"file": file})],
                env={**os.environ, **ENVIRONMENT},
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                pass_fds=[file],
            )
            theirs.close()
            self._members.append((process, ours))

    def steps(self, count: int) -> float:
        """Takes steps on all workers at once.

        Returns:
            The seconds that the slowest worker took.

        Raises:
            TeamError: a worker failed or gave no answer.
        """
        try:
            for _, pipe in self._members:
                pipe.send(count)
        except (BrokenPipeError, ConnectionResetError):
            pass  # Its last words are read below.
        waiting = {pipe: rank for rank, (_, pipe) in enumerate(self._members)}
        seconds = []
        end = time.monotonic() + self._timeout
        while waiting:
            ready = wait(waiting, max(0.0, end - time.monotonic()))
            if not ready:
                ranks = ", ".join(map(str, waiting.values()))
                raise TeamError(f"worker {ranks} gave no answer within {self._timeout:.0f} s")
            # A worker that failed is heard while those that wait for it are silent.
            seconds += [self._read(waiting.pop(pipe)) for pipe in ready]
        return max(seconds)

    def stop(self) -> None:
        """Ends the processes."""
        for process, _ in self._members:
            process.kill()
        for process, pipe in self._members:
            process.wait()
            pipe.close()
        self._members = []
        self._log.close()

    def _read(self, rank: int) -> float:
        process, pipe = self._members[rank]
        try:
            answer = pipe.recv()
        except (EOFError, ConnectionResetError):
            code = process.wait(5)
            words = self._last_words()
            raise TeamError(f"worker {rank} ended with exit code {code}: {words}") from None
        if isinstance(answer, str):
            raise TeamError(f"worker {rank}: {answer}")
        return float(answer)

    def _last_words(self) -> str:
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "without a word")


def free_addresses(count: int) -> list[str]:
    """Addresses of this machine with ports that are free."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    addresses = [f"127.0.0.1:{s.getsockname()[1]}" for s in sockets]
    for s in sockets:
        s.close()
    return addresses
