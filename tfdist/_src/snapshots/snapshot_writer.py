"""Writes snapshots in the background, one at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable

from tfdist._src.cluster.net.wait_messages import say


class SnapshotWriter:
    """Runs one function after the other in a thread.

    A failure costs that snapshot only: training goes on, and a line says what is wrong.

    Args:
        asynchronous: whether to return before a function has ended.
    """

    def __init__(self, *, asynchronous: bool) -> None:
        self._asynchronous = asynchronous
        self._thread: threading.Thread | None = None
        self.failed = False

    def submit(self, step: int, write: Callable[[], object]) -> None:
        """Runs a function, once the one before has ended.

        Args:
            step: of which snapshot, for messages.
            write: writes it.
        """
        self.wait()

        def run() -> None:
            self.failed = True
            try:
                write()
                self.failed = False
            except Exception as error:  # whatever it is, training is worth more
                say(
                    f"tfdist: the snapshot of step {step} could not be written: "
                    f"{type(error).__name__}: {error}. "
                    "Training goes on, and later snapshots are tried. Free space, or correct the "
                    "directory of tfdist.callbacks.BackupAndRestore."
                )

        # Python waits at its end for threads that are no daemons.
        self._thread = threading.Thread(target=run, name="tfdist-snapshot", daemon=False)
        self._thread.start()
        if not self._asynchronous:
            self.wait()

    def wait(self) -> None:
        """Waits until nothing is being written."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
