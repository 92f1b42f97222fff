"""Starts the workers of a training run, which then take steps on request."""

from __future__ import annotations

import contextlib
import socket
import sys
import tempfile
import threading
from collections.abc import Iterator
from typing import Any
from urllib.request import urlopen

from benchmarks.observing.watches import WATCHES
from benchmarks.step_time.members import Members
from benchmarks.step_time.team import free_addresses

INTERVAL = 1.0  # Seconds between two requests for the metrics.


class Team(Members):
    """Workers that sleep until the driver requests steps.

    Args:
        model: a key of `MODELS`.
        workers: the number of workers. Each has one core and one compute thread; see `take_place`.
        metrics: whether the workers serve metrics.
        timeout: the maximum time to wait for an answer, in seconds.
    """

    def __init__(self, model: str, workers: int, metrics: bool, timeout: float = 180.0) -> None:
        addresses = free_addresses(workers) if workers > 1 else []
        port = free_port(workers) if metrics else 0
        self._urls = [f"http://127.0.0.1:{port + rank}/metrics" for rank in range(workers)]
        self._folder = tempfile.TemporaryDirectory()
        order: dict[str, Any] = {"model": model, "addresses": addresses, "metrics_port": port}
        order["folder"] = self._folder.name
        super().__init__(
            [[sys.executable, "-m", "benchmarks.observing.worker"]] * workers,
            [{**order, "rank": rank} for rank in range(workers)],
            timeout,
        )

    def steps(self, watch: str, count: int) -> tuple[list[float], int]:
        """Takes one step without timing it, and then times steps, on all workers concurrently.

        Args:
            watch: the way to watch, a key of `WATCHES`.
            count: the number of timed steps.

        Returns:
            The time of each step in seconds, on the worker with the longest total time; and the
            number of inputs and collectives that the first worker's recorder has counted in these
            steps.

        Raises:
            TeamError: a worker failed or did not answer.
        """
        self.ask([watch, 1])
        with self._scraping() if WATCHES[watch].scraped else contextlib.nullcontext():
            answers = self.ask([watch, count])
        return max((times for times, _ in answers), key=sum), answers[0][1]

    def stop(self) -> None:
        """Stops the workers, and removes their files."""
        super().stop()
        self._folder.cleanup()

    @contextlib.contextmanager
    def _scraping(self) -> Iterator[None]:
        """Requests the metrics of all workers once a second until the context exits.

        The first requests are sent immediately.
        """
        done = threading.Event()

        def scrape() -> None:
            while True:
                for url in self._urls:
                    with urlopen(url, timeout=INTERVAL) as page:
                        page.read()
                if done.wait(INTERVAL):
                    return

        thread = threading.Thread(target=scrape)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()


def free_port(count: int) -> int:
    """Finds `count` free ports with consecutive numbers, and returns the first one."""
    while True:
        with contextlib.ExitStack() as sockets, contextlib.suppress(OSError):
            first = 0
            for i in range(count):
                server = socket.create_server(("", first + i if first else 0))
                first = first or sockets.enter_context(server).getsockname()[1]
                sockets.enter_context(server)
            return first
