"""A worker process: its command, environment, signals and progress, and the watchdog.

The watchdog is a process that reads a pipe from the launcher. Each worker writes its process group
to the pipe before it executes its program; the program does not inherit the pipe. The launcher
removes the group once the worker has exited. When the launcher dies for any reason, the kernel
closes the pipe, and the watchdog sends SIGKILL to the remaining groups. Therefore workers and their
child processes die with the launcher, except for a process that has moved to another session or
process group.
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

# Settings that are not sent to other hosts, because they belong to one host or one launcher. The
# secret is sent separately, or created again. All other settings must be the same for all workers.
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
    """Returns the variables to send: the settings of tfdist, and the chosen variables.

    Args:
        environment: the environment of the command.
        chosen: `"NAME"`, or `"NAME=VALUE"`.

    Raises:
        ValueError: a chosen variable is not set.

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
    """A worker to start.

    Attributes:
        rank: its rank in the job.
        command: the program and its arguments.
        settings: the variables added to the environment that it inherits.
    """

    rank: int
    command: tuple[str, ...]
    settings: Mapping[str, str]

    def __str__(self) -> str:
        """Formats the plan as a shell command."""
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
        shared: settings of all workers of this host.
        per_worker: additional settings of each worker of this host.

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
    """Starts the watchdog. Create it while the launcher has one thread and no workers.

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
        """Adds the calling process's group; a worker calls this between fork and exec."""
        self._send(f"+{os.getpid()}\n")

    def remove(self, group: int) -> None:
        """Removes a process group; call it before its number can be reused."""
        self._send(f"-{group}\n")

    def close(self) -> None:
        """Stops the watchdog, which kills the groups that have not been removed."""
        os.close(self._write)
        os.waitpid(self._pid, 0)

    def _send(self, line: str) -> None:
        try:
            os.write(self._write, line.encode())
        except BrokenPipeError:
            pass  # The watchdog was killed: the job continues without it.


def _watch(read: int) -> None:
    """Kills the remaining groups once the launcher is gone. Runs only in the forked process."""
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
    """Memory for one worker's progress; disappears with the launcher, without leaving a file.

    Attributes:
        path: a path at which a process of the same user can open the memory.

    Raises:
        LaunchError: the system is out of descriptors or memory.

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
        """Returns the worker's progress so far."""
        return Progress.from_bytes(os.pread(self._descriptor, SIZE, 0))

    def take(self) -> Progress:
        """Returns the worker's progress, and releases the memory; call it once."""
        try:
            return self.read()
        finally:
            os.close(self._descriptor)


Stream = IO[bytes] | int | None
# The maximum wait for a killed process, since a process that is stuck in a driver never exits.
_END_SECONDS = 5.0


class WorkerProcess:
    """Starts one worker.

    The worker leads its own session, so that Ctrl-C in the terminal reaches only the launcher. The
    launcher decides how to signal the workers, and sends each signal to the worker and all its
    child processes.

    Args:
        plan: the worker to start.
        environment: the environment that it inherits, overridden by the plan's settings.
        streams: its stdin, stdout and stderr, as accepted by `subprocess.Popen`.
        watchdog: kills the worker if the launcher dies.
        inherit: additional descriptors that the worker inherits, under the same numbers.

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
                # Running Python between fork and exec is safe, because other threads of the
                # launcher, if any, only resolve host names. Since the worker is added there, the
                # watchdog knows it before its program runs.
                preexec_fn=watchdog.add_this_process,
            )
        except (OSError, subprocess.SubprocessError) as error:
            raise LaunchError(f"worker {plan.rank} could not be started: {error}") from error
        self.pid = self._process.pid

    def exit_code(self) -> int | None:
        """Returns the worker's exit code, or the negative signal number; None while it runs.

        If the worker has exited, kills the rest of its process group.
        """
        if self._process.returncode is None:
            # The worker is reaped only after its group is dead, so that the group's number cannot
            # be reused earlier.
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
        """Kills the worker, and waits briefly for its end."""
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
            pass  # It has just exited.
