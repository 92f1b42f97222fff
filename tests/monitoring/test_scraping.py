"""Two workers are scraped while they train, by hand and by Prometheus."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.error import URLError
from urllib.parse import quote
from urllib.request import urlopen

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.harness.tiers import exhaustive
from tests.monitoring.test_collector import expressions
from tfdist._src.launch.job.ports import Reservation

SCRIPT = Path(__file__).with_name("script.py")
ROOT = SCRIPT.parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}


@pytest.fixture
def ports() -> Iterator[tuple[int, int]]:
    """Two consecutive ports, held."""
    with contextlib.ExitStack() as stack:
        while True:
            (first,) = stack.enter_context(Reservation(1)).ports
            second = stack.enter_context(socket.socket())
            second.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with contextlib.suppress(OSError, OverflowError):
                second.bind(("", first + 1))
                break
        yield first, first + 1


def command(folder: Path, port: int, epochs: int) -> list[str]:
    launcher = [sys.executable, "-m", "tfdist", "run", "-n", "2", "--metrics-port", str(port)]
    return [*launcher, str(SCRIPT), str(folder), str(epochs)]


@contextlib.contextmanager
def training(folder: Path, port: int, epochs: int) -> Iterator[subprocess.Popen[str]]:
    """Two workers that train for some epochs, and then wait until this ends."""
    job = subprocess.Popen(
        command(folder, port, epochs),
        env=ENVIRONMENT,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield job
        (folder / "stop").touch()
        _, errors = job.communicate()
        assert job.returncode == 0, errors
        assert f"metrics on 127.0.0.1, ports {port} (worker 0) to {port + 1} (worker 1)" in errors
    finally:
        job.terminate()
        job.wait()
        job.stderr.close()


def until(condition, job):
    while not condition():
        assert job.poll() is None, job.stderr.read()
        time.sleep(0.1)


def scrape(port):
    with urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
        families = text_string_to_metric_families(answer.read().decode())
    return {
        (s.name.removeprefix("tfdist_"), *s.labels.values()): s.value
        for family in families
        for s in family.samples
    }


@exhaustive
def test_what_two_workers_have_trained(ports, tmp_path):
    began = time.monotonic()
    with training(tmp_path, ports[0], epochs=3) as job:
        until(lambda: all((tmp_path / f"trained-{rank}").exists() for rank in (0, 1)), job)
        workers = [scrape(port) for port in ports]
    elapsed = time.monotonic() - began
    assert sum(worker["rows_total",] for worker in workers) == 3 * 43
    assert workers[0]["rows_total",] > workers[1]["rows_total",] > 0
    for rank, worker in enumerate(workers):
        (info,) = [key for key in worker if key[0] == "info"]
        assert (info[2], info[3]) == (str(rank), "MultiWorkerMirroredStrategy")
        assert worker["workers",] == 2
        steps = worker["step_seconds_count",]
        assert steps == worker["step_seconds_bucket", "+Inf"] == 18
        assert 0 < worker["step_seconds_sum",] < elapsed
        # The numbers of rows, the gradients and the metrics of each step.
        assert worker["collectives_total", "all_reduce"] >= 3 * steps
        waits = [worker["wait_seconds_total", cause] for cause in ("input", "workers", "network")]
        assert 0 < sum(waits) < elapsed
        assert all(wait > 0 for wait in waits)
        # The gradients of 195 float32.
        assert worker["sent_bytes_total",] >= 18 * 4 * 195


@exhaustive
def test_a_worker_whose_port_is_taken_trains_without_metrics(ports, tmp_path):
    (tmp_path / "stop").touch()
    with socket.create_server(("127.0.0.1", ports[0])):
        done = subprocess.run(
            command(tmp_path, ports[0], epochs=1),
            env=ENVIRONMENT,
            stderr=subprocess.PIPE,
            text=True,
        )
    assert done.returncode == 0, done.stderr
    assert all((tmp_path / f"trained-{rank}").exists() for rank in (0, 1))
    (line,) = [line for line in done.stderr.splitlines() if "serves no metrics" in line]
    assert line.startswith("tfdist: worker 0 (") and f"cannot listen on port {ports[0]} of" in line


@exhaustive
@pytest.mark.skipif(not shutil.which("prometheus"), reason="prometheus is not installed")
def test_prometheus_answers_what_the_dashboard_asks(ports, tmp_path):
    with Reservation(1) as reservation, training(tmp_path, ports[0], epochs=1 << 30) as job:
        (own,) = reservation.ports
        with prometheus(tmp_path, own, ports):
            for expression in expressions():
                ranks = {"0", "1"} if "group_left" in expression else {None}
                if "device_bytes" in expression:
                    ranks = set()  # Nothing goes from GPU to GPU here.
                until(lambda query=expression, ranks=ranks: answered(own, query) == ranks, job)


@contextlib.contextmanager
def prometheus(folder: Path, own: int, ports: tuple[int, int]) -> Iterator[None]:
    """A Prometheus that scrapes these ports every second."""
    targets = [f"127.0.0.1:{port}" for port in ports]
    scraped = {"job_name": "training", "static_configs": [{"targets": targets}]}
    config = {"global": {"scrape_interval": "1s"}, "scrape_configs": [scraped]}
    (folder / "prometheus.yml").write_text(json.dumps(config))
    server = subprocess.Popen(
        [
            "prometheus",
            f"--config.file={folder / 'prometheus.yml'}",
            f"--storage.tsdb.path={folder / 'data'}",
            f"--web.listen-address=127.0.0.1:{own}",
            "--log.level=error",
        ]
    )
    try:
        yield
    finally:
        server.terminate()
        server.wait()


def answered(port: int, expression: str) -> set[str | None]:
    """The ranks of what Prometheus answers now; nothing until it is ready."""
    query = expression.replace("$__rate_interval", "1m").replace("$job", "training")
    try:
        with urlopen(f"http://127.0.0.1:{port}/api/v1/query?query={quote(query)}") as answer:
            results = json.load(answer)["data"]["result"]
    except (ConnectionError, URLError) as error:
        assert getattr(error, "code", 503) == 503, expression
        return set()
    return {result["metric"].get("rank") for result in results}
