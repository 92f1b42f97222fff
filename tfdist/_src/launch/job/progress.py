"""The launcher's side of the memory in which a worker reports its progress."""

from __future__ import annotations

import os

from tfdist._src.progress_file import SIZE, Progress
from tfdist.errors import LaunchError

VARIABLE = "TFDIST_PROGRESS_FILE"


class ProgressMemory:
    """Memory for one worker, which ends with the launcher: it leaves no file.

    Attributes:
        path: where a process of the same user opens it.

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
            raise LaunchError(f"there is no memory for a worker's progress: {error}") from error
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
