"""Starts worker processes, sends them signals, and makes sure that they die with the launcher.

The last task belongs to the watchdog, a process that reads a pipe from the launcher. Each worker
writes the ID of its process group to the pipe before it executes its program; the program does not
inherit the pipe. When the worker has exited, the launcher tells the watchdog to forget the group.
If the launcher dies for any reason, the kernel closes the pipe. Then the watchdog sends SIGKILL to
all groups that it still knows. Therefore the workers and their child processes die with the
launcher. Only processes that have moved to another session or process group survive.
"""

import json
import os
import shlex
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from tfdist._src.options import PREFIX, InternalVariable, Variable
from tfdist._src.progress_file import SIZE, Progress
from tfdist.errors import LaunchError

# The environment variables of tfdist that `forwarded` leaves out. Most of them have a meaning only
# for one host or one launcher. The caller of `forwarded` adds the secret itself, or creates a new
# one. All other variables of tfdist must be the same for all workers.
_NOT_SENT = frozenset(
    {
        Variable.HOST,
        Variable.SECRET,
        InternalVariable.GENERATION,
        InternalVariable.PROGRESS_FILE,
        InternalVariable.WITNESS,
    }
)


def forwarded(environment: Mapping[str, str], chosen: Sequence[str]) -> dict[str, str]:
    """Returns the environment variables to send from this command to the workers on other hosts.

    These are the variables of tfdist, and the variables that the user has chosen.

    Args:
        environment: the environment variables of this command.
        chosen: the user's choices. `"NAME"` sends the value in `environment`, and `"NAME=VALUE"`
            sends the given value.

    Raises:
        ValueError: a choice is malformed, or a variable that was chosen by name is not set.

    Example:
        >>> forwarded({"TFDIST_XLA": "0", "A": "1", "B": "2"}, ["A", "C=3"])
        {'TFDIST_XLA': '0', 'A': '1', 'C': '3'}
    """
    sent = {
        name: value
        for name, value in environment.items()
        if name.startswith(PREFIX) and name not in _NOT_SENT
    }
    for choice in chosen:
        name, given, value = choice.partition("=")
        if not name:
            raise ValueError(f"-x must be NAME or NAME=VALUE. Received: {choice!r}")
        if not given and name not in environment:
            raise ValueError(
                f"-x {name}: this variable is not set; set it, or pass -x {name}=VALUE"
            )
        sent[name] = value if given else environment[name]
    return sent


@dataclass(frozen=True)
class WorkerPlan:
    """How to start a worker.

    Attributes:
        rank: the worker's rank in the job.
        command: the command that the worker executes, with its arguments.
        settings: the environment variables that are added to the environment that the worker
            inherits from the launcher.
    """

    rank: int
    command: tuple[str, ...]
    settings: Mapping[str, str]

    def __str__(self) -> str:
        """Formats the plan as a shell command that sets the variables and runs the command."""
        settings = [f"{name}={shlex.quote(value)}" for name, value in self.settings.items()]
        return " ".join([*settings, shlex.join(self.command)])


def plan_workers(
    *,
    addresses: Sequence[str],
    first: int,
    command: Sequence[str],
    shared: Mapping[str, str],
    per_worker: Sequence[Mapping[str, str]],
) -> tuple[WorkerPlan, ...]:
    """Plans the workers of one host.

    Args:
        addresses: `"host:port"` of every worker of the job, in rank order.
        first: the rank of this host's first worker.
        command: the command that each worker runs.
        shared: the environment variables that all workers of this host have in common.
        per_worker: for each worker of this host, its additional environment variables.

    Returns:
        One plan for each entry of `per_worker`.

    Example:
        >>> plan, = plan_workers(addresses=["127.0.0.1:4000"], first=0,
        ...                      command=["python", "train.py"], shared={}, per_worker=[{}])
        >>> plan.settings["TF_CONFIG"]
        '{"cluster": {"worker": ["127.0.0.1:4000"]}, "task": {"type": "worker", "index": 0}}'
    """
    return tuple(
        WorkerPlan(
            rank=rank,
            command=tuple(command),
            settings={"TF_CONFIG": _tf_config(addresses, rank), **shared, **settings},
        )
        for rank, settings in enumerate(per_worker, start=first)
    )


def _tf_config(addresses: Sequence[str], rank: int) -> str:
    return json.dumps(
        {"cluster": {"worker": list(addresses)}, "task": {"type": "worker", "index": rank}}
    )


_READ_SIZE = 65536


class Watchdog:
    """Starts the watchdog, which is a fork of the launcher's process.

    Create this object while the launcher has only one thread and has not started any worker.

    Example:
        >>> watchdog = Watchdog()
        >>> watchdog.close()
    """

    def __init__(self) -> None:
        read, self._write = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            try:
                os.close(self._write)
                _watch(read)
            finally:
                os._exit(0)
        os.close(read)

    def add_this_process(self) -> None:
        """Tells the watchdog the process group of the calling process.

        A new worker calls this method between fork and exec.
        """
        self._send(f"+{os.getpid()}\n")

    def remove(self, group: int) -> None:
        """Tells the watchdog to forget a process group.

        Call this method before the kernel can assign the same ID to another process group.
        """
        self._send(f"-{group}\n")

    def close(self) -> None:
        """Stops the watchdog. Before it exits, it kills all process groups that it still knows."""
        os.close(self._write)
        os.waitpid(self._pid, 0)

    def _send(self, line: str) -> None:
        try:
            os.write(self._write, line.encode())
        except BrokenPipeError:
            pass  # The watchdog was killed. The job continues without it.


def _watch(read: int) -> None:
    """Runs the watchdog in the forked process: waits until the launcher is gone, kills the groups.

    Args:
        read: the descriptor of the pipe from the launcher.
    """
    os.setsid()  # Signals sent to the launcher's process group must not reach this process.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nowhere, stream)
    groups: set[int] = set()
    rest = b""
    while data := os.read(read, _READ_SIZE):
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            change = groups.add if line.startswith(b"+") else groups.discard
            change(int(line[1:]))
    for group in groups:
        try:
            os.killpg(group, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            pass


class ProgressMemory:
    """Shared memory in which a worker reports its progress to the launcher.

    The memory is not a file on a disk, so nothing remains if the launcher dies.

    Attributes:
        path: the path at which the worker, or another process of the same user, can open the
            memory.

    Raises:
        LaunchError: the system has no free file descriptors or memory.

    Example:
        >>> memory = ProgressMemory()
        >>> memory.take()
        Progress(steps=None, raised=None)
    """

    def __init__(self) -> None:
        try:
            self._descriptor = os.memfd_create("tfdist-progress")
            os.ftruncate(self._descriptor, SIZE)
        except OSError as error:
            raise LaunchError(f"no memory for a worker's progress: {error}") from error
        self.path = f"/proc/{os.getpid()}/fd/{self._descriptor}"

    def read(self) -> Progress:
        """Returns the progress that the worker has reported so far."""
        return Progress.from_bytes(os.pread(self._descriptor, SIZE, 0))

    def take(self) -> Progress:
        """Returns the progress that the worker has reported, and releases the memory.

        Call this method only once.
        """
        try:
            return self.read()
        finally:
            os.close(self._descriptor)


Stream = IO[bytes] | int | None
# The maximum number of seconds to wait for the exit of a killed process. A process that is stuck in
# a driver never exits.
_END_SECONDS = 5.0


class WorkerProcess:
    """Starts one worker.

    The worker is the leader of its own session, so that Ctrl-C in the terminal reaches only the
    launcher. The launcher decides which signals to send to the workers. Each signal goes to the
    worker's process group, and thereby also to the worker's child processes.

    Args:
        plan: describes the worker to start.
        environment: the environment variables that the worker inherits. The settings of `plan` have
            priority over them.
        streams: the worker's stdin, stdout and stderr, each as accepted by `subprocess.Popen`.
        watchdog: kills the worker if the launcher dies.
        inherit: additional file descriptors that the worker inherits with the same numbers.

    Raises:
        LaunchError: the system cannot start the process.
    """

    def __init__(
        self,
        plan: WorkerPlan,
        environment: Mapping[str, str],
        streams: tuple[Stream, Stream, Stream],
        watchdog: Watchdog,
        inherit: Sequence[int] = (),
    ) -> None:
        self._watchdog = watchdog
        try:
            self._process = subprocess.Popen(
                plan.command,
                env={**environment, **plan.settings},
                stdin=streams[0],
                stdout=streams[1],
                stderr=streams[2],
                start_new_session=True,
                pass_fds=inherit,
                # The worker tells the watchdog its process group before its program runs. It is
                # safe to run Python between fork and exec here: if the launcher has other threads,
                # they only resolve host names.
                preexec_fn=watchdog.add_this_process,
            )
        except (OSError, subprocess.SubprocessError) as error:
            raise LaunchError(f"worker {plan.rank} could not be started: {error}") from error
        self.pid = self._process.pid

    def exit_code(self) -> int | None:
        """Returns the worker's exit code, or None while the worker is running.

        If a signal has killed the worker, the exit code is the negative number of the signal. If
        the worker has exited, this method also kills the rest of its process group.
        """
        if self._process.returncode is None:
            # Kill the process group before the worker is reaped. Until then, the kernel cannot
            # assign the ID of the group to another group.
            options = os.WEXITED | os.WNOHANG | os.WNOWAIT
            if os.waitid(os.P_PID, self.pid, options) is None:
                return None
            self.signal(signal.SIGKILL)
            self._watchdog.remove(self.pid)
            self._process.wait()
        return self._process.returncode

    @property
    def stopped(self) -> bool:
        """Whether the worker is suspended by a signal (SIGSTOP)."""
        try:
            text = Path(f"/proc/{self.pid}/stat").read_text()
        except OSError:  # The worker has ended.
            return False
        return text.rpartition(")")[2].split()[0] == "T"

    def end(self) -> None:
        """Kills the worker, and waits for its exit, for at most 5 seconds."""
        if self._process.returncode is None:
            self.signal(signal.SIGKILL)
            deadline = time.monotonic() + _END_SECONDS
            while self.exit_code() is None and time.monotonic() < deadline:
                time.sleep(0.005)

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal to the worker's process group."""
        try:
            os.killpg(self.pid, number)
        except (ProcessLookupError, PermissionError):
            pass  # The worker has just exited.
