"""Where the workers' output goes: the terminal, log files, or both."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from tfdist.errors import LaunchError
from tfdist.launch.job.line_buffer import LineAssembler, last_lines
from tfdist.launch.job.worker import Stream

_READ_SIZE = 65536
_READS_AT_ONCE = 16
_TAIL_LINES = 20
_CHIEF = 0


@dataclass
class _Copy:
    """A worker's pipe, and where its content goes."""

    pipe: int
    log: BinaryIO
    lines: LineAssembler


class Output:
    """The output of this machine's workers.

    The chief's goes straight to the terminal, unless the mode is `"none"`: it inherits the
    launcher's streams, so its progress bar stays one bar. The others' goes into one file each;
    with `"all"` through a pipe, from which the launcher copies it into the file and, line by
    line after the rank, to its own stdout.

    Args:
        mode: a member of `arguments.OUTPUTS`.
        log_dir: where the files go, made if it is missing; None for a temporary folder.

    Raises:
        LaunchError: the folder cannot be made.
    """

    def __init__(self, mode: str, log_dir: str | None) -> None:
        self._mode = mode
        self._temporary = log_dir is None
        try:
            if log_dir is None:
                self._folder = Path(tempfile.mkdtemp(prefix="tfdist-"))
            else:
                self._folder = Path(log_dir).absolute()
                self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise LaunchError(
                f"the folder for the workers' output cannot be made: {error}. "
                f"Give another one by --log-dir."
            ) from error
        self._copies: dict[int, _Copy] = {}

    def inherited(self, rank: int) -> bool:
        """Whether this worker writes to the terminal itself."""
        return rank == _CHIEF and self._mode != "none"

    def log(self, rank: int) -> Path:
        """The file that holds, or would hold, this worker's output."""
        return self._folder / f"worker-{rank}.log"

    @contextmanager
    def streams(self, rank: int) -> Iterator[tuple[Stream, Stream, Stream]]:
        """The stdin, stdout and stderr to start a worker with.

        The launcher's copies are closed on leaving, so that a pipe ends with the worker.

        Raises:
            LaunchError: the log file cannot be written.
        """
        if self.inherited(rank):
            yield None, None, None
            return
        try:
            log = self.log(rank).open("wb", buffering=0)
        except OSError as error:
            raise LaunchError(
                f"the output of worker {rank} cannot be written: {error}. "
                f"Give another folder by --log-dir."
            ) from error
        if self._mode != "all":
            with log:
                yield subprocess.DEVNULL, log, log
            return
        read, write = os.pipe()
        os.set_blocking(read, False)
        self._copies[rank] = _Copy(read, log, LineAssembler(f"[{rank}] "))
        try:
            yield subprocess.DEVNULL, write, write
        finally:
            os.close(write)

    def pipes(self) -> dict[int, int]:
        """The file descriptors to wait for, by rank: `copy` takes what they hold."""
        return {rank: copy.pipe for rank, copy in self._copies.items()}

    def copy(self, rank: int) -> None:
        """Copies what a worker has written so far; after its last byte, its pipe is closed."""
        copy = self._copies[rank]
        # One worker that never pauses must not keep the launcher from the others.
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
                pass  # A full disk is no reason to end the job.
            _show(copy.lines.feed(data))

    def tail(self, rank: int) -> list[str]:
        """The last lines of a worker that has ended; none if they went to the terminal only."""
        return [] if self.inherited(rank) else last_lines(self.log(rank), _TAIL_LINES)

    def written(self) -> Path | None:
        """The folder with the workers' output; None if all of it went to the terminal."""
        return self._folder if any(self._folder.glob("worker-*.log")) else None

    def finish(self, rank: int) -> None:
        """Copies the last output of a worker that has ended."""
        if rank in self._copies:
            self.copy(rank)
        if rank in self._copies:  # A process outside its group holds the pipe open.
            self._close(rank)

    def remove(self) -> None:
        """Removes the folder if it is a temporary one: nobody will ask for it."""
        if self._temporary:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _close(self, rank: int) -> None:
        copy = self._copies.pop(rank)
        _show(copy.lines.flush())
        os.close(copy.pipe)
        copy.log.close()


def _show(data: bytes) -> None:
    """Writes whole lines to the launcher's stdout, in one call where the system lets it."""
    try:
        while data:
            data = data[os.write(1, data) :]
    except BrokenPipeError:
        pass  # Nobody reads any more; the log files still get everything.
