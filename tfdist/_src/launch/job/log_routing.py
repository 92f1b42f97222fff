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
    """Assembles whole lines with a prefix from output that arrives in pieces.

    If the output rewrites a line with carriage returns, as a progress bar does, only the last
    version of the line is kept. Lines longer than 64 KiB are split.

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
        """Adds a piece of output, and returns the lines that are complete now, with the prefix."""
        *lines, rest = (self._rest + data).split(b"\n")
        while len(rest) > _MAX_LINE:
            lines.append(rest[:_MAX_LINE])
            rest = rest[_MAX_LINE:]
        self._rest = rest
        return b"".join(self._prefix + _last_state(line) + b"\n" for line in lines)

    def flush(self) -> bytes:
        """Ends and returns the unfinished line, with the prefix; b"" if there is none."""
        return self.feed(b"\n") if self._rest else b""


def last_lines(path: Path, count: int, start: int = 0) -> list[str]:
    """Returns the last lines of a file, each truncated to 500 characters.

    Args:
        path: the file. If it cannot be read, no lines are returned. Bytes that are not UTF-8 are
            replaced.
        count: the maximum number of lines.
        start: the position in the file at which the lines begin. Earlier lines are ignored.
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
# A write of at most this number of bytes to a pipe is atomic. It also does not block if poll has
# reported that the pipe is writable.
_ATOMIC = select.PIPE_BUF


@dataclass
class _Copy:
    """The pipe from which a worker's output is read, and the places to which it is copied."""

    pipe: int
    log: BinaryIO
    lines: LineAssembler


class Output:
    """Routes the output of this host's workers to the terminal, to log files, or to both.

    The chief inherits the launcher's stdin, stdout and stderr, so that its progress bar is drawn
    correctly. All other workers write to log files. The mode changes this:

    - In the mode `"none"`, the chief also writes to a log file.
    - In the mode `"all"`, all workers except the chief write to pipes. The launcher copies their
      output to the log files, and also to its own stdout, with the rank before each line.

    Args:
        mode: a member of `run_options.OUTPUTS`.
        log_dir: the directory of the log files, which is created if it does not exist; None for a
            temporary directory.

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
        """Begins a new generation of workers.

        Each generation has its own folder, so that the log files of earlier generations are kept.

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
        """Returns the folder for the files of a generation; for generation 0, `folder` itself.

        Example:
            >>> Output.of_generation(Path("logs"), 2)
            PosixPath('logs/restart-2')
        """
        return folder / f"restart-{generation}" if generation else folder

    def inherited(self, rank: int) -> bool:
        """Returns whether a worker inherits the launcher's stdin, stdout and stderr."""
        return rank == _CHIEF and self._mode != "none"

    def log(self, rank: int) -> Path:
        """Returns the path of a worker's log file in this generation; the file may not exist."""
        return self._folder / f"worker-{rank}.log"

    @contextlib.contextmanager
    def streams(self, rank: int, mark: str = "") -> Iterator[tuple[Stream, Stream, Stream]]:
        """Returns a context manager that provides the stdin, stdout and stderr of a new worker.

        When the context ends, the launcher's copies of the descriptors are closed. Therefore the
        launcher reads the end of the worker's pipe when the worker exits.

        Args:
            rank: the worker's rank.
            mark: the line that separates the output of the replaced worker from the output of the
                new worker in the log file; "" to overwrite the log file.

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
            pass  # Do not stop the job because the disk is full.
        self._starts[rank] = log.tell()
        return log

    def pipes(self) -> dict[int, int]:
        """Returns the file descriptors of the workers' pipes, by rank.

        When a descriptor is readable, call `copy`. If the reader of the launcher's stdout is too
        slow, no descriptors are returned, so that the launcher reads no further output. Then the
        workers block when they write, but the launcher does not block.
        """
        self._shown.advance()
        if self._shown.is_behind:
            return {}
        return {rank: copy.pipe for rank, copy in self._copies.items()}

    def register(self, poll: select.poll) -> None:
        """Registers the workers' pipes with `poll`, and also stdout while lines are pending."""
        for pipe in self.pipes().values():
            poll.register(pipe, select.POLLIN)
        if self._shown.is_behind:
            poll.register(self._shown.descriptor, select.POLLOUT)

    def copy(self, rank: int) -> None:
        """Copies the output that a worker has written; if the pipe has ended, closes it."""
        copy = self._copies[rank]
        # The number of reads is limited, so that the launcher also serves other workers if one
        # worker writes without a pause.
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
                pass  # Do not stop the job because the disk is full.
            self._shown.write(copy.lines.feed(data))

    def tail(self, rank: int) -> list[str]:
        """Returns the last lines of a worker's output; none if they went only to the terminal."""
        if self.inherited(rank):
            return []
        return last_lines(self.log(rank), _TAIL_LINES, self._starts.get(rank, 0))

    @property
    def directory(self) -> Path:
        """The absolute path of the directory that contains the files of all generations."""
        return self._directory

    def written(self) -> Path | None:
        """Returns the folder with this generation's log files; None if there are no log files."""
        logs = (*self._folder.glob("worker-*.log"), *self._folder.glob("flight-*.json"))
        return self._folder if logs else None

    def is_empty(self) -> bool:
        """Returns whether the directory contains no file of any generation."""
        return not any(path.is_file() for path in self._directory.rglob("*"))

    def finish(self, rank: int) -> None:
        """Copies the remaining output of a worker that has exited."""
        if rank in self._copies:
            self.copy(rank)
        # If the pipe has not ended, a process outside the worker's process group holds it open.
        if rank in self._copies:
            self._close(rank)

    def show_rest(self) -> None:
        """Writes the rest of the output to the launcher's stdout, and waits until it is written."""
        self._shown.finish()

    def remove(self) -> None:
        """Removes the directory if it is a temporary directory."""
        if self._temporary:
            shutil.rmtree(self._directory, ignore_errors=True)

    def _close(self, rank: int) -> None:
        copy = self._copies.pop(rank)
        self._shown.write(copy.lines.flush())
        os.close(copy.pipe)
        copy.log.close()


class ShownOutput:
    """Writes lines to the launcher's stdout, without blocking if its reader is slow.

    Lines that cannot be written yet are kept, and are called pending. The caller must pass whole
    lines, because other processes, such as the chief, may write to the same pipe or terminal.

    Args:
        target: the file descriptor of stdout.

    Attributes:
        descriptor: the descriptor that is used to write. While lines are pending, wait until it is
            writable, and then call `advance`.
    """

    def __init__(self, target: int = 1) -> None:
        self.descriptor = _without_waiting(target)
        self._backlog = bytearray()

    @property
    def is_behind(self) -> bool:
        """Whether any lines are pending."""
        return bool(self._backlog)

    def write(self, lines: bytes) -> None:
        """Writes lines after the pending lines, as far as possible without blocking."""
        self._backlog += lines
        self.advance()

    def advance(self) -> None:
        """Writes as many pending lines as possible without blocking."""
        while self._backlog and self._writable(0):
            end = self._backlog.rfind(b"\n", 0, _ATOMIC) + 1 or _ATOMIC
            try:
                del self._backlog[: os.write(self.descriptor, self._backlog[:end])]
            except BlockingIOError:
                return
            except OSError:  # The reader is gone. The log files still contain all output.
                self._backlog.clear()

    def finish(self) -> None:
        """Writes all pending lines, and blocks until they are written."""
        while self._backlog:
            self._writable(None)
            self.advance()

    def _writable(self, timeout: int | None) -> bool:
        poll = select.poll()
        poll.register(self.descriptor, select.POLLOUT)
        return bool(poll.poll(timeout))


def _without_waiting(target: int) -> int:
    """Opens the pipe or terminal of the descriptor `target` once more, in non-blocking mode.

    The mode of `target` itself does not change, because other processes also write to it. If
    `target` is neither a pipe nor a terminal, returns `target`.
    """
    with contextlib.suppress(OSError):
        kind = os.fstat(target).st_mode
        if stat.S_ISFIFO(kind) or stat.S_ISCHR(kind):
            flags = os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY
            return os.open(f"/proc/self/fd/{target}", flags)
    return target
