"""The processes of one training, which are started once and take steps on request."""

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

INTERVAL = 1.0  # seconds between scrapes


class Team(Members):
    """Workers of tfdist that sleep until steps are requested.

    Args:
        model: a key of `MODELS`.
        workers: the number of processes; worker i runs on core i only, with one compute thread.
        metrics: whether the workers serve metrics.
        timeout: seconds to wait for an answer.
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
        """Takes steps on all workers concurrently, after one step that is not timed.

        Args:
            watch: a key of `WATCHES`.
            count: the number of steps.

        Returns:
            The seconds of each step on the worker with the longest total time, and the count of the
            first worker's recorder.

        Raises:
            TeamError: a worker failed or did not answer.
        """
        self.ask([watch, 1])
        with self._scraping() if WATCHES[watch].scraped else contextlib.nullcontext():
            answers = self.ask([watch, count])
        return max((times for times, _ in answers), key=sum), answers[0][1]

    def stop(self) -> None:
        """Stops the processes, and removes their files."""
        super().stop()
        self._folder.cleanup()

    @contextlib.contextmanager
    def _scraping(self) -> Iterator[None]:
        """Reads all workers' metrics immediately, and then once a second, in this context."""
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
    """Returns the first of `count` consecutive free ports of this machine."""
    while True:
        with contextlib.ExitStack() as sockets, contextlib.suppress(OSError):
            first = 0
            for i in range(count):
                server = socket.create_server(("", first + i if first else 0))
                first = first or sockets.enter_context(server).getsockname()[1]
                sockets.enter_context(server)
            return first
