"""Signals to the launcher, in a form that its event loop can wait on."""

from __future__ import annotations

import os
import signal
from types import FrameType, TracebackType
from typing import Any

# The signals that ask the launcher to stop. SIGCHLD, which is handled too, only wakes it up.
_STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Signals:
    """A context manager with a file descriptor that becomes readable when a signal arrives.

    A stopping signal that was ignored at the start, as `nohup` does with SIGHUP, stays ignored.

    Example:
        >>> with Signals() as signals:
        ...     os.kill(os.getpid(), signal.SIGTERM)
        ...     signals.take()
        [<Signals.SIGTERM: 15>]
    """

    def __enter__(self) -> Signals:
        self._read, self._write = os.pipe()
        os.set_blocking(self._read, False)
        os.set_blocking(self._write, False)
        self._before_wakeup = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        self._before: dict[signal.Signals, Any] = {}
        for number in (*_STOPPING, signal.SIGCHLD):
            if number == signal.SIGCHLD or signal.getsignal(number) != signal.SIG_IGN:
                self._before[number] = signal.signal(number, _ignore)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._before_wakeup)
        os.close(self._read)
        os.close(self._write)

    def fileno(self) -> int:
        """The descriptor to wait on."""
        return self._read

    def take(self) -> list[signal.Signals]:
        """The stopping signals received since the last call, in order."""
        try:
            numbers = os.read(self._read, 4096)
        except BlockingIOError:
            return []
        return [signal.Signals(number) for number in numbers if number in _STOPPING]


def _ignore(number: int, frame: FrameType | None) -> None:
    """Does nothing: Python writes the number to the wakeup descriptor."""
