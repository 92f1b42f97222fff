"""The logger "tfdist", to which workers and the launcher write their messages."""

import collections
import errno
import logging
import os
import select
import stat
import sys
import time

from tfdist._src.options import log_level

_PATIENCE_SECONDS = 0.2
_EXIT_SECONDS = 1.0
_MAX_PENDING = 1000

logger = logging.getLogger("tfdist")


class StderrHandler(logging.Handler):
    """Writes messages to stderr, in whole lines and without blocking.

    If stderr is full because nothing reads it, the first message waits for 0.2 s, and later
    messages do not wait. Lines that cannot be written are kept. When stderr is writable again, they
    are written together with a later message, or at exit. If more than 1000 lines are kept, further
    messages are dropped, and a later line reports the number of dropped messages. A forked child
    process does not inherit the kept lines.

    The handler skips a message if a handler of the application prints the same message to stdout or
    stderr, as after `logging.basicConfig()` or in `absl.app.run`. If the application has replaced
    `sys.stderr`, the replacement gets each line immediately, and may block.
    """

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(_Formatter())
        self._forget()
        os.register_at_fork(after_in_child=self._forget)

    def _forget(self) -> None:
        self._pending: collections.deque[bytes] = collections.deque()
        self._dropped = 0
        self._stalled = False
        self._writing = False

    def emit(self, record: logging.LogRecord) -> None:
        """Writes the line of a log record, or keeps the line until stderr is writable."""
        if self._is_printed_by_others(record):
            return
        try:
            self._emit(record)
        except (OSError, ValueError, RuntimeError):
            pass  # Stderr is closed or broken, or a signal interrupted a write to its replacement.
        except Exception:
            self.handleError(record)

    def _emit(self, record: logging.LogRecord) -> None:
        stream = sys.stderr
        if stream is None:
            return
        start = "\n" if getattr(record, "below_output", False) and stream.isatty() else ""
        line = f"{start}{self.format(record)}\n"
        if sys.__stderr__ is None or stream is not sys.__stderr__:
            # A notebook, a test or the application has replaced `sys.stderr`.
            stream.write(line)
            stream.flush()
            return
        descriptor = stream.fileno()
        if len(self._pending) >= _MAX_PENDING:
            self._write_pending(descriptor, 0.0)
        if len(self._pending) < _MAX_PENDING:
            self._count_dropped()
            self._pending.append(line.encode(stream.encoding or "utf-8", "backslashreplace"))
        else:
            self._dropped += 1
        self._write_pending(descriptor, 0.0 if self._stalled else _PATIENCE_SECONDS)

    def flush(self) -> None:
        """Writes the pending lines, waiting at most one second. Called at exit."""
        try:
            self._count_dropped()
            if self._pending and sys.__stderr__ is not None:
                self._write_pending(sys.__stderr__.fileno(), _EXIT_SECONDS)
        except (OSError, ValueError):
            pass  # Stderr is closed.

    def _count_dropped(self) -> None:
        if self._dropped:
            text = f"tfdist: dropped {self._dropped} messages, since nobody read stderr\n"
            self._pending.append(text.encode())
            self._dropped = 0

    def _write_pending(self, descriptor: int, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        # If a signal handler logs a message during a write, the message is only added to the
        # pending lines, and this loop writes it after the current line.
        while self._pending and not self._writing:
            self._writing = True
            try:
                self._stalled = not self._write_first(descriptor, deadline)
            finally:
                self._writing = False
            if self._stalled:
                return

    def _write_first(self, descriptor: int, deadline: float) -> bool:
        poll = select.poll()
        poll.register(descriptor, select.POLLOUT)
        if not poll.poll(1e3 * max(0.0, deadline - time.monotonic())):
            return False
        try:
            written = _write(descriptor, self._pending[0][: select.PIPE_BUF])
        except OSError:
            self._pending.clear()  # Stderr is closed, here or by its reader.
            return True
        if written == len(self._pending[0]):
            self._pending.popleft()
        else:
            self._pending[0] = self._pending[0][written:]
        return written > 0

    def _is_printed_by_others(self, record: logging.LogRecord) -> bool:
        streams = (sys.stderr, sys.stdout, sys.__stderr__, sys.__stdout__)
        terminals = [stream for stream in streams if stream is not None]
        source: logging.Logger | None = logging.getLogger(record.name)
        while source is not None:
            for handler in source.handlers:
                # absl's handler has an attribute `python_handler`, the handler that prints.
                stream = getattr(getattr(handler, "python_handler", handler), "stream", None)
                prints = any(stream is terminal for terminal in terminals)
                if prints and handler is not self and record.levelno >= handler.level:
                    return True
            source = source.parent if source.propagate else None
        return False


class _Formatter(logging.Formatter):
    """Begins a message with "tfdist: ", or with "tfdist run: " for the logger "tfdist.run"."""

    def format(self, record: logging.LogRecord) -> str:
        return f"{record.name.replace('.', ' ')}: {super().format(record)}"


def _write(descriptor: int, data: bytes) -> int:
    """Writes data to a file descriptor that is ready for writing, without blocking.

    Another process may fill the pipe just before this write. To prevent blocking in this case, the
    function opens a pipe a second time, in non-blocking mode. A write of up to `PIPE_BUF` bytes to
    a pipe is atomic.

    Args:
        descriptor: the descriptor. The flags of this descriptor are not changed, because other
            processes share them.
        data: at most `PIPE_BUF` bytes.

    Returns:
        The number of bytes written; 0 if the pipe has no room.

    Raises:
        OSError: the descriptor is closed, or its reader is gone.
    """
    target = descriptor
    if stat.S_ISFIFO(os.fstat(descriptor).st_mode):
        flags = os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC
        try:
            target = os.open(f"/proc/self/fd/{descriptor}", flags)
        except OSError as error:
            if error.errno == errno.ENXIO:
                raise  # The reader is gone.
            # There is no /proc, or the pipe belongs to another user: write to the original
            # descriptor.
    try:
        return os.write(target, data)
    except BlockingIOError:
        return 0
    finally:
        if target != descriptor:
            os.close(target)


if logger.level == logging.NOTSET:
    try:
        logger.setLevel(log_level().upper())
    except ValueError:  # The launcher and the strategies report the invalid level.
        logger.setLevel(logging.INFO)
logger.addHandler(StderrHandler())
