"""The processes of one backend, started once and asked for some steps at a time."""

from __future__ import annotations

import json
import multiprocessing
import os
import socket
import traceback
from typing import Any

CONNECTED = ("tfdist", "stock")


class TeamError(Exception):
    """A worker failed or gave no answer; the message says which and why."""


class Team:
    """Workers of one backend that sleep until they are asked for steps.

    Args:
        backend: a key of `BACKENDS`.
        model: a key of `MODELS`.
        workers: how many processes; worker i runs on core i alone, with one thread to compute.
        timeout: seconds to wait for an answer.
    """

    def __init__(self, backend: str, model: str, workers: int, timeout: float = 180.0) -> None:
        context = multiprocessing.get_context("spawn")
        connected = backend in CONNECTED and workers > 1
        addresses = free_addresses(workers) if connected else []
        self._timeout = timeout
        self._members = []
        for rank in range(workers):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=work, args=(backend, model, rank, workers, addresses, theirs), daemon=True
            )
            process.start()
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
        except BrokenPipeError:
            pass  # Its last words are read below.
        return max(self._answer(rank) for rank in range(len(self._members)))

    def stop(self) -> None:
        """Ends the processes."""
        for process, pipe in self._members:
            process.kill()
            process.join()
            pipe.close()
        self._members = []

    def _answer(self, rank: int) -> float:
        process, pipe = self._members[rank]
        if not pipe.poll(self._timeout):
            raise TeamError(f"worker {rank} gave no answer within {self._timeout:.0f} s")
        try:
            answer = pipe.recv()
        except (EOFError, ConnectionResetError):
            process.join(1)
            raise TeamError(f"worker {rank} ended with exit code {process.exitcode}") from None
        if isinstance(answer, str):
            raise TeamError(f"worker {rank}: {answer}")
        return float(answer)


def work(
    backend: str, model: str, rank: int, workers: int, addresses: list[str], pipe: Any
) -> None:
    """A worker's life: settings that TensorFlow reads when it is imported, then steps."""
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)  # TensorFlow's greetings; errors go through the pipe.
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    os.environ.pop("TF_CONFIG", None)
    os.environ.update(
        CUDA_VISIBLE_DEVICES="",
        OMP_NUM_THREADS="1",
        TF_NUM_INTRAOP_THREADS="1",
        TF_NUM_INTEROP_THREADS="2",
    )
    if addresses:
        task = {"type": "worker", "index": rank}
        os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": addresses}, "task": task})
    try:
        from stepping.backends import BACKENDS
        from stepping.clock import Clock
        from stepping.models import MODELS

        BACKENDS[backend](MODELS[model], workers, Clock(pipe))
    except EOFError:
        pass  # The driver is gone.
    except Exception:
        pipe.send(traceback.format_exc().strip().splitlines()[-1])


def free_addresses(count: int) -> list[str]:
    """Addresses of this machine with ports that are free."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    addresses = [f"127.0.0.1:{s.getsockname()[1]}" for s in sockets]
    for s in sockets:
        s.close()
    return addresses
