"""Routes the workers' output to the terminal, log files, or both."""

import contextlib
import os
import select
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from tfdist._src.launch.job.worker import Stream
from tfdist.errors import LaunchError

_MAX_LINE = 65536
_TAIL_BYTES = 65536
_TAIL_WIDTH = 500


class LineAssembler:
    """Assembles complete, prefixed lines from output that arrives in pieces.

    If a line is rewritten with carriage returns, as in a progress bar, only its last state is kept.
    Lines longer than 64 KiB are split.

    Args:
        prefix: the text before each line.

    Example:
        >>> lines = LineAssembler("[1] ")
        >>> lines.feed(b"1/2\\r2/2\\nsav"), lines.feed(b"ed\\n")
        (b'[1] 2/2\\n', b'[1] saved\\n')
    """

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix.encode()
        self._rest = b""

    def feed(self, data: bytes) -> bytes:
        """Adds output, and returns the completed lines with the prefix."""
        *lines, rest = (self._rest + data).split(b"\n")
        while len(rest) > _MAX_LINE:
            lines.append(rest[:_MAX_LINE])
            rest = rest[_MAX_LINE:]
        self._rest = rest
        return b"".join(self._prefix + _last_state(line) + b"\n" for line in lines)

    def flush(self) -> bytes:
        """Returns the unfinished line with the prefix; b"" if the last line was complete."""
        return self.feed(b"\n") if self._rest else b""


def last_lines(path: Path, count: int, start: int = 0) -> list[str]:
    """Returns the last lines of a file, each truncated to 500 characters.

    Args:
        path: the file, which may be missing or not UTF-8.
        count: the maximum number of lines.
        start: the position in the file to begin at.
    """
    try:
        with path.open("rb") as file:
            file.seek(max(start, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            data = file.read()
    except OSError:
        return []
    lines = data.rstrip().split(b"\n")[-count:] if data.strip() else []
    return [_last_state(line).decode(errors="replace")[:_TAIL_WIDTH] for line in lines]


def _last_state(line: bytes) -> bytes:
    return line.rstrip(b"\r").rpartition(b"\r")[2]


_READ_SIZE = 65536
_READS_AT_ONCE = 16
_TAIL_LINES = 20
_CHIEF = 0
# A write of up to this size to a pipe is atomic, and fits once poll reports the pipe as writable.
_ATOMIC = select.PIPE_BUF


@dataclass
class _Copy:
    """A worker's pipe and its destinations."""

    pipe: int
    log: BinaryIO
    lines: LineAssembler


class Output:
    """Routes the output of this host's workers.

    The chief inherits the launcher's streams, unless the mode is `"none"`, so that its progress bar
    is drawn correctly. Every other worker writes to a log file. In the mode `"all"`, every other
    worker writes to a pipe instead. The launcher copies this output to the log file, and to its own
    stdout with the rank before each line.

    Args:
        mode: a member of `run_options.OUTPUTS`.
        log_dir: the directory for the files, created if missing; None for a temporary one.

    Raises:
        LaunchError: the directory cannot be created.
    """

    def __init__(self, mode: str, log_dir: str | None) -> None:
        self._mode = mode
        self._temporary = log_dir is None
        try:
            if log_dir is None:
                self._directory = Path(tempfile.mkdtemp(prefix="tfdist-"))
            else:
                self._directory = Path(log_dir).absolute()
                self._directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise LaunchError(
                f"the directory for worker output cannot be created: {error}. "
                f"Choose another one with --log-dir."
            ) from error
        self._folder = self._directory
        self._shown = ShownOutput()
        self._copies: dict[int, _Copy] = {}
        self._starts: dict[int, int] = {}

    def begin(self, generation: int) -> None:
        """Begins a generation in its own folder, so that files of earlier generations are kept.

        Raises:
            LaunchError: the folder cannot be created.
        """
        self._folder = self.of_generation(self._directory, generation)
        try:
            self._folder.mkdir(exist_ok=True)
        except OSError as error:
            raise LaunchError(
                f"the directory for worker output cannot be created: {error}"
            ) from error

    @staticmethod
    def of_generation(folder: Path, generation: int) -> Path:
        """Returns the folder for the files of a generation; the first one uses the given folder.

        Example:
            >>> Output.of_generation(Path("logs"), 2)
            PosixPath('logs/restart-2')
        """
        return folder / f"restart-{generation}" if generation else folder

    def inherited(self, rank: int) -> bool:
        """Whether this worker inherits the launcher's streams."""
        return rank == _CHIEF and self._mode != "none"

    def log(self, rank: int) -> Path:
        """Returns the path of this worker's log file in this generation; the file may not exist."""
        return self._folder / f"worker-{rank}.log"

    @contextlib.contextmanager
    def streams(self, rank: int, mark: str = "") -> Iterator[tuple[Stream, Stream, Stream]]:
        """Provides the stdin, stdout and stderr of a new worker, as a context manager.

        On exit, closes the launcher's copies of the descriptors. The pipe then ends when the worker
        exits.

        Args:
            rank: the worker's rank.
            mark: the line between the replaced worker's output and the new worker's output in the
                log; "" to overwrite the log.

        Raises:
            LaunchError: the log file cannot be written.
        """
        if self.inherited(rank):
            yield None, None, None
            return
        try:
            log = self._open(rank, mark)
        except OSError as error:
            raise LaunchError(
                f"the output of worker {rank} cannot be written: {error}. "
                f"Choose another directory with --log-dir."
            ) from error
        if self._mode != "all":
            with log:
                yield subprocess.DEVNULL, log, log
            return
        try:
            read, write = os.pipe()
        except OSError as error:
            log.close()
            raise LaunchError(f"the output of worker {rank} cannot be read: {error}") from error
        os.set_blocking(read, False)
        self._copies[rank] = _Copy(read, log, LineAssembler(f"[{rank}] "))
        try:
            yield subprocess.DEVNULL, write, write
        finally:
            os.close(write)

    def _open(self, rank: int, mark: str) -> BinaryIO:
        if not mark:
            self._starts.pop(rank, None)
            return self.log(rank).open("wb", buffering=0)
        log = self.log(rank).open("ab", buffering=0)
        try:
            log.write(f"{mark}\n".encode())
        except OSError:
            pass  # A full disk is no reason to stop the job.
        self._starts[rank] = log.tell()
        return log

    def pipes(self) -> dict[int, int]:
        """Returns the file descriptors to wait on, by rank; read them with `copy`.

        Returns no descriptors while the reader of the launcher's stdout is behind. Then the workers
        block when they write, like rank 0, but the launcher does not block.
        """
        self._shown.advance()
        if self._shown.is_behind:
            return {}
        return {rank: copy.pipe for rank, copy in self._copies.items()}

    def register(self, poll: select.poll) -> None:
        """Registers the workers' pipes, and stdout if lines are waiting for it."""
        for pipe in self.pipes().values():
            poll.register(pipe, select.POLLIN)
        if self._shown.is_behind:
            poll.register(self._shown.descriptor, select.POLLOUT)

    def copy(self, rank: int) -> None:
        """Copies a worker's available output, and closes the pipe at its end."""
        copy = self._copies[rank]
        # Bounded, so that one worker that never pauses does not starve the others.
        for _ in range(_READS_AT_ONCE):
            try:
                data = os.read(copy.pipe, _READ_SIZE)
            except BlockingIOError:
                return
            if not data:
                self._close(rank)
                return
            try:
                copy.log.write(data)
            except OSError:
                pass  # A full disk is no reason to stop the job.
            self._shown.write(copy.lines.feed(data))

    def tail(self, rank: int) -> list[str]:
        """Returns an exited worker's last lines; none if they went only to the terminal."""
        if self.inherited(rank):
            return []
        return last_lines(self.log(rank), _TAIL_LINES, self._starts.get(rank, 0))

    @property
    def directory(self) -> Path:
        """The directory for the files of all generations, an absolute path."""
        return self._directory

    def written(self) -> Path | None:
        """Returns the directory with this generation's log files; None if there are none."""
        logs = (*self._folder.glob("worker-*.log"), *self._folder.glob("flight-*.json"))
        return self._folder if logs else None

    def is_empty(self) -> bool:
        """Whether no generation has written a file."""
        return not any(path.is_file() for path in self._directory.rglob("*"))

    def finish(self, rank: int) -> None:
        """Copies the remaining output of a worker that has exited."""
        if rank in self._copies:
            self.copy(rank)
        if rank in self._copies:  # A process outside the worker's group keeps the pipe open.
            self._close(rank)

    def show_rest(self) -> None:
        """Shows all copied output; waits for the reader of the launcher's stdout."""
        self._shown.finish()

    def remove(self) -> None:
        """Removes the directory if it is temporary."""
        if self._temporary:
            shutil.rmtree(self._directory, ignore_errors=True)

    def _close(self, rank: int) -> None:
        copy = self._copies.pop(rank)
        self._shown.write(copy.lines.flush())
        os.close(copy.pipe)
        copy.log.close()


class ShownOutput:
    """Writes to the launcher's stdout without waiting for its reader.

    Accepts whole lines; other processes may write to the same descriptor.

    Args:
        target: the descriptor.

    Attributes:
        descriptor: the descriptor to wait on for writing while lines are pending.
    """

    def __init__(self, target: int = 1) -> None:
        self.descriptor = _without_waiting(target)
        self._backlog = bytearray()

    @property
    def is_behind(self) -> bool:
        """Whether lines are pending."""
        return bool(self._backlog)

    def write(self, lines: bytes) -> None:
        """Writes lines, after the pending ones."""
        self._backlog += lines
        self.advance()

    def advance(self) -> None:
        """Writes pending lines without blocking."""
        while self._backlog and self._writable(0):
            end = self._backlog.rfind(b"\n", 0, _ATOMIC) + 1 or _ATOMIC
            try:
                del self._backlog[: os.write(self.descriptor, self._backlog[:end])]
            except BlockingIOError:
                return
            except OSError:  # The reader is gone; the log files still receive everything.
                self._backlog.clear()

    def finish(self) -> None:
        """Writes all pending lines; blocks until all are written."""
        while self._backlog:
            self._writable(None)
            self.advance()

    def _writable(self, timeout: int | None) -> bool:
        poll = select.poll()
        poll.register(self.descriptor, select.POLLOUT)
        return bool(poll.poll(timeout))


def _without_waiting(target: int) -> int:
    """Opens the same pipe or terminal in non-blocking mode; other processes' writes still block."""
    with contextlib.suppress(OSError):
        kind = os.fstat(target).st_mode
        if stat.S_ISFIFO(kind) or stat.S_ISCHR(kind):
            flags = os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY
            return os.open(f"/proc/self/fd/{target}", flags)
    return target
