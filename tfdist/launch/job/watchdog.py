"""A process that kills the workers when the launcher has died without doing so itself.

It reads a pipe whose only writer is the launcher. Each worker writes its process group into the
pipe before it runs its program, and the launcher takes the group out again when it has ended.
The kernel closes the pipe when the launcher dies, however it dies; whatever groups are left then
get SIGKILL. So workers and what they start die with the launcher, but for a process that has
moved into a session or process group of its own.
"""

from __future__ import annotations

import os
import signal

_READ_SIZE = 65536


class Watchdog:
    """Starts the process; to be made while the launcher has one thread and no worker.

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
        """Enters the calling process's own group; for a worker between fork and exec."""
        self._tell(f"+{os.getpid()}\n")

    def remove(self, group: int) -> None:
        """Takes out a process group; to be called before its number can be used again."""
        self._tell(f"-{group}\n")

    def close(self) -> None:
        """Ends the process, which kills the groups that are still entered."""
        os.close(self._write)
        os.waitpid(self._pid, 0)

    def _tell(self, line: str) -> None:
        try:
            os.write(self._write, line.encode())
        except BrokenPipeError:
            pass  # Somebody killed the watchdog: the job goes on without it.


def _watch(read: int) -> None:
    """Reads until the launcher is gone, then kills. Runs in the forked process alone."""
    os.setsid()  # What is sent to the launcher's process group must not reach this process.
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
