"""The workers of a soak as `tfdist run --elastic` would have them, and what happens to them."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.soaking.audit import is_settled
from tests.soaking.plan import Event
from tests.soaking.records import Ended, read
from tests.soaking.worker import Training

LOOK = 0.1  # seconds between two looks at the records, less than a slow step takes
ROOT = Path(__file__).parents[2]


@dataclass
class Member:
    """A worker's process and its address."""

    process: subprocess.Popen[bytes]
    address: str


@dataclass
class Members:
    """Workers of this machine that come and go.

    Attributes:
        training: what they train.
        log: the file for their output.
        environment: variables for all of them.
        timeout: seconds to wait for whatever is awaited.
        living: those that belong to the group or want to, by age.
        stopped: those that have got SIGSTOP and are to be woken (True) or killed (False).
        allowed: exit codes of those to which something was done.
        all: all that were ever started.
    """

    training: Training
    log: Path
    environment: dict[str, str]
    timeout: float
    living: list[Member] = field(default_factory=list)
    stopped: list[tuple[Member, bool]] = field(default_factory=list)
    allowed: dict[int, set[int]] = field(default_factory=dict)
    all: list[Member] = field(default_factory=list)

    def start(self, count: int) -> None:
        """Starts the first workers."""
        addresses = [free_address() for _ in range(count)]
        for index in range(count):
            self._launch(addresses, index)

    def happen(self, events: Sequence[Event]) -> None:
        """Lets all these happen, each at its step, and those after others have settled."""
        last = 0
        for event in events:
            if event.step > last:
                self.settle()
                self.slow_from(event.step)
                self.wait(lambda step=event.step: self.reached() >= step, f"step {event.step}")
                last = event.step
            self.apply(event)
        self.settle()
        Path(self.training.slow).unlink(missing_ok=True)

    def slow_from(self, step: int) -> None:
        """Steps are slow from this one on."""
        part = Path(f"{self.training.slow}.part")
        part.write_text(str(step))
        part.replace(self.training.slow)

    def apply(self, event: Event) -> None:
        """Does to the group what an event says."""
        if event.kind == "join":
            # One of these must live on; the newest may have yet to join.
            addresses = [member.address for member in reversed(self.living)]
            self._launch([*addresses, free_address()], len(addresses))
            return
        member = self.living.pop(event.position)
        process = member.process
        if event.kind == "kill":
            self.allowed[process.pid] = {-signal.SIGKILL}
            process.kill()
        elif event.kind == "leave":
            self.allowed[process.pid] = {0, 75, -signal.SIGTERM}
            process.terminate()
        else:
            self.allowed[process.pid] = set(range(256)) if event.wakes else {-signal.SIGKILL}
            process.send_signal(signal.SIGSTOP)
            self.stopped.append((member, event.wakes))

    def settle(self) -> None:
        """Waits until the living train as one group; then those that were stopped go on or die.

        Steps are slow meanwhile, so that there are some left for it.
        """
        self.slow_from(0)
        self.wait(
            lambda: is_settled(
                read(self.training.records), {member.process.pid for member in self.living}
            ),
            "a group of all that live",
        )
        for member, wakes in self.stopped:
            if not wakes:
                member.process.kill()
            member.process.send_signal(signal.SIGCONT)
        self.stopped = []

    def finish(self) -> dict[int, int | None]:
        """Waits for the end of all; returns their exit codes, None for those that do not end."""
        end = time.monotonic() + self.timeout
        for member in self.all:
            try:
                member.process.wait(max(0.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                pass
        return {member.process.pid: member.process.returncode for member in self.all}

    def stop(self) -> None:
        """Kills those that are left."""
        for member in self.all:
            member.process.kill()
        for member in self.all:
            member.process.wait()

    def reached(self) -> int:
        """The last step that anyone has ended."""
        records = read(self.training.records).values()
        return max((r.step for of in records for r in of if isinstance(r, Ended)), default=0)

    def wait(self, until: Callable[[], bool], what: str) -> None:
        """Waits for something.

        Raises:
            TimeoutError: it takes too long, or nobody is left to do it.
        """
        end = time.monotonic() + self.timeout
        while not until():
            if time.monotonic() > end:
                raise TimeoutError(f"{what} has taken more than {self.timeout:.0f} s")
            if all(member.process.poll() is not None for member in self.living):
                raise TimeoutError(f"the workers have ended before {what}")
            time.sleep(LOOK)

    def _launch(self, addresses: Sequence[str], index: int) -> None:
        task = {"type": "worker", "index": index}
        config = json.dumps({"cluster": {"worker": list(addresses)}, "task": task})
        with self.log.open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "tests.soaking.worker", self.training.argument()],
                env={
                    **os.environ,
                    **self.environment,
                    "TF_CONFIG": config,
                    "TFDIST_ELASTIC": "1",
                },
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.living.append(Member(process, addresses[index]))
        self.all.append(self.living[-1])


def free_address() -> str:
    """An address of this machine with a port that is free."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"127.0.0.1:{server.getsockname()[1]}"
