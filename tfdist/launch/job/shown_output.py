"""The launcher's stdout, written to without ever waiting for whoever reads it."""

from __future__ import annotations

import contextlib
import os
import select
import stat

_ATOMIC = select.PIPE_BUF
"""So many bytes at once mix with nobody else's in a pipe, and fit once it can be written to."""


class ShownOutput:
    """Whole lines on their way to a descriptor that others write to as well.

    Args:
        target: the descriptor.

    Attributes:
        descriptor: to be waited on for writing while there are lines that do not fit yet.
    """

    def __init__(self, target: int = 1) -> None:
        self.descriptor = _without_waiting(target)
        self._backlog = bytearray()

    @property
    def is_behind(self) -> bool:
        """Whether there are lines that do not fit yet."""
        return bool(self._backlog)

    def write(self, lines: bytes) -> None:
        """Writes lines, after those that do not fit yet."""
        self._backlog += lines
        self.advance()

    def advance(self) -> None:
        """Writes what fits."""
        while self._backlog and self._writable(0):
            end = self._backlog.rfind(b"\n", 0, _ATOMIC) + 1 or _ATOMIC
            try:
                del self._backlog[: os.write(self.descriptor, self._backlog[:end])]
            except BlockingIOError:
                return
            except OSError:  # The reader is gone; the log files still get everything.
                self._backlog.clear()

    def finish(self) -> None:
        """Writes everything, however long that takes."""
        while self._backlog:
            self._writable(None)
            self.advance()

    def _writable(self, timeout: int | None) -> bool:
        poll = select.poll()
        poll.register(self.descriptor, select.POLLOUT)
        return bool(poll.poll(timeout))


def _without_waiting(target: int) -> int:
    """The same pipe or terminal, opened again: others that have it open go on waiting for room."""
    with contextlib.suppress(OSError):
        kind = os.fstat(target).st_mode
        if stat.S_ISFIFO(kind) or stat.S_ISCHR(kind):
            flags = os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY
            return os.open(f"/proc/self/fd/{target}", flags)
    return target
