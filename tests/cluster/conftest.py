"""Ranks for the tests: threads of this process if that suffices, else real processes."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import tfdist
from tests.harness.deadlines import FAR
from tfdist._src.cluster import Session, Topology, from_tf_config, meet
from tfdist._src.options import Options

from .mesh_ranks import MESH

ROOT = str(Path(tfdist.__file__).parents[1])
PRELUDE = r"""
import os, sys, threading, time
from tfdist._src.cluster import from_environment, meet
from tfdist._src.cluster.net import wait_messages
from tfdist._src.options import Options
if "SAY_EVERY" in os.environ:
    seconds = float(os.environ["SAY_EVERY"])
    wait_messages.FIRST_SECONDS = wait_messages.EVERY_SECONDS = seconds
session = meet(from_environment(), Options.from_environment())
rank = session.rank

def tell(*words):  # print() is not safe in two threads
    os.write(1, (" ".join(map(str, words)) + "\n").encode())

def stay():  # until the process is killed
    threading.Event().wait()

tell("met")
"""


def tf_config(addresses: list[str], index: int) -> str:
    task = {"type": "worker", "index": index}
    return json.dumps({"cluster": {"worker": addresses}, "task": task})


@pytest.fixture
def addresses() -> Iterator[Callable[..., list[str]]]:
    """Reserves loopback addresses as the launcher does: bound, not listening."""
    held: list[socket.socket] = []

    def reserve(count: int, host: str = "127.0.0.1") -> list[str]:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        fresh = [socket.socket(family) for _ in range(count)]
        held.extend(fresh)
        for sock in fresh:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind((host, 0))
        name = f"[{host}]" if ":" in host else host
        return [f"{name}:{sock.getsockname()[1]}" for sock in fresh]

    yield reserve
    for sock in held:
        sock.close()


@pytest.fixture
def until() -> Callable[..., None]:
    """Waits for a condition."""

    def wait(condition: Callable[[], object]) -> None:
        while not condition():
            time.sleep(0.01)

    return wait


@pytest.fixture
def dial() -> Callable[..., socket.socket]:
    """Connects to an address as soon as a process listens there."""

    def connect(address: str) -> socket.socket:
        port = int(address.rpartition(":")[2])
        while True:
            try:
                return socket.create_connection(("127.0.0.1", port), timeout=FAR)
            except ConnectionRefusedError:
                time.sleep(0.01)

    return connect


class Attempt(threading.Thread):
    """One rank's meet() in a thread."""

    def __init__(self, topology: Topology, options: Options) -> None:
        super().__init__(daemon=True)
        self.topology, self.options = topology, options
        self.lines: list[str] = []
        self.session: Session | None = None
        self.error: Exception | None = None
        self.start()

    def run(self) -> None:
        try:
            add = self.lines.append
            self.session = meet(self.topology, self.options, announce=add, warn=add)
        except Exception as error:
            self.error = error

    def met(self) -> Session:
        self.join()
        assert self.session is not None, self.error
        return self.session

    def failed(self) -> Exception:
        self.join()
        assert self.error is not None
        return self.error


@pytest.fixture
def attempt() -> Iterator[Callable[..., Attempt]]:
    """Starts one rank in a thread."""
    attempts: list[Attempt] = []

    def start(addresses: list[str], index: int, **options: Any) -> Attempt:
        topology = from_tf_config(tf_config(addresses, index))
        attempts.append(Attempt(topology, Options(**{"start_timeout": FAR, **options})))
        return attempts[-1]

    yield start
    for started in attempts:
        started.join(20)
        if started.session:
            started.session.close()


@pytest.fixture
def sessions(
    addresses: Callable[[int], list[str]], attempt: Callable[..., Attempt]
) -> Callable[..., list[Session]]:
    """A group of threads with a session."""

    def start(count: int, **options: float) -> list[Session]:
        cluster = addresses(count)
        return [a.met() for a in [attempt(cluster, rank, **options) for rank in range(count)]]

    return start


@pytest.fixture
def in_parallel() -> Callable[..., list[Any]]:
    """Calls a function for all items concurrently; an exception counts as a result."""

    def call(function: Callable[[Any], Any], items: list[Any]) -> list[Any]:
        results: list[Any] = [None] * len(items)

        def one(position: int) -> None:
            try:
                results[position] = function(items[position])
            except Exception as error:
                results[position] = error

        threads = [threading.Thread(target=one, args=(n,), daemon=True) for n in range(len(items))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return results

    return call


class Process(subprocess.Popen[str]):
    """A rank as a process; its stdout and stderr form one stream."""

    def until(self, text: str) -> str:
        """Reads until a line contains the text, and returns that line."""
        assert self.stdout is not None
        before = []
        while line := self.stdout.readline():
            if text in line:
                return line
            before.append(line)
        raise AssertionError(
            f"the process exited ({self.wait()}) without {text!r}: {''.join(before)}"
        )

    def rest(self) -> str:
        """The remaining output, until the process exits."""
        assert self.stdout is not None
        text = self.stdout.read()  # communicate() would miss what until() has buffered
        self.wait()
        return text


@pytest.fixture
def spawn() -> Iterator[Callable[..., Process]]:
    """Starts one rank as a process that joins the others and runs a piece of code."""
    processes: list[Process] = []

    def start(addresses: list[str], index: int, body: str, **environment: str) -> Process:
        process = Process(
            [sys.executable, "-c", PRELUDE + textwrap.dedent(body)],
            env={
                **os.environ,
                "PYTHONPATH": ROOT,
                "TF_CONFIG": tf_config(addresses, index),
                "TFDIST_START_TIMEOUT": str(FAR),
                **environment,
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        processes.append(process)
        return process

    yield start
    for process in processes:
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()


@pytest.fixture
def job(
    addresses: Callable[[int], list[str]], spawn: Callable[..., Process]
) -> Callable[..., list[Process]]:
    """A group of processes with a session, each running the same piece of code."""

    def start(count: int, body: str, **environment: str) -> list[Process]:
        cluster = addresses(count)
        processes = [spawn(cluster, rank, body, **environment) for rank in range(count)]
        for process in processes:
            process.until("met")
        return processes

    return start


@pytest.fixture
def run(
    addresses: Callable[[int], list[str]],
    spawn: Callable[..., Process],
    until: Callable[..., None],
) -> Iterator[Callable[..., list[dict[str, Any]]]]:
    """Runs a body on each rank after MESH, and returns their reports.

    `hosts` sets TFDIST_HOST of each rank; `outside` is called with the addresses meanwhile.
    """

    def start(
        count: int,
        body: str,
        hosts: str = "",
        outside: Callable[[list[str]], object] = lambda cluster: None,
        **environment: str,
    ) -> list[dict[str, Any]]:
        cluster = addresses(count)
        processes = []
        for rank in range(count):
            own = {"TFDIST_HOST": hosts[rank]} if hosts else {}
            code = MESH + textwrap.dedent(body)
            processes.append(spawn(cluster, rank, code, **own, **environment))
        outside(cluster)
        found = []
        for process in processes:
            output = process.rest()
            lines = [line for line in output.splitlines() if line.startswith("REPORT ")]
            assert lines or process.returncode < 0, output
            found.append(json.loads(lines[-1].removeprefix("REPORT ")) if lines else {})
        return found

    def segments() -> set[str]:
        return {name for name in os.listdir("/dev/shm") if name.startswith("tfdist-")}

    before = segments()
    yield start
    until(lambda: segments() <= before)
