"""A process that kills the workers if the launcher dies without doing so itself.

It reads a pipe whose only writer is the launcher. Each worker writes its process group to the pipe
before it executes its program, and the launcher removes the group once the worker has exited. The
kernel closes the pipe however the launcher dies, and the remaining groups then get SIGKILL. So
workers and their child processes die with the launcher, except for a process that has moved to
another session or process group.
"""

from __future__ import annotations

import os
import signal

_READ_SIZE = 65536


class Watchdog:
    """Starts the process. Create it while the launcher has one thread and no workers.

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
        """Adds the calling process's group; for a worker between fork and exec."""
        self._send(f"+{os.getpid()}\n")

    def remove(self, group: int) -> None:
        """Removes a process group; call it before its number can be reused."""
        self._send(f"-{group}\n")

    def close(self) -> None:
        """Stops the process, which kills the groups that have not been removed."""
        os.close(self._write)
        os.waitpid(self._pid, 0)

    def _send(self, line: str) -> None:
        try:
            os.write(self._write, line.encode())
        except BrokenPipeError:
            pass  # The watchdog was killed: the job continues without it.


def _watch(read: int) -> None:
    """Reads until the launcher is gone, then kills. Runs only in the forked process."""
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
