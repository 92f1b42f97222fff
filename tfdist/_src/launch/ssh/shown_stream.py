"""What a host prints, shown on a stream of this process, and the report of its agent in it."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import IO

from tfdist._src.launch.job.line_buffer import LineAssembler

# The agent's report follows. What the shell of the host prints before, such as a greeting, is not
# meant.
MARK = "tfdist launcher "
_MARK = b"\n" + MARK.encode()


class ShownStream:
    """One pipe.

    Args:
        pipe: where the output arrives.
        target: the descriptor to show it on.
        prefix: the text before each line; None to show everything as it is.
        report: called with the report of the agent, if it comes on this pipe.
    """

    def __init__(
        self,
        pipe: IO[bytes],
        target: int,
        prefix: str | None,
        report: Callable[[str], None] | None,
    ) -> None:
        self._pipe = pipe  # Kept open.
        self._target = target
        self._lines = None if prefix is None else LineAssembler(prefix)
        self._report = report
        self._before = b""

    def feed(self, data: bytes) -> bytes:
        """Shows what has arrived, b"" for the end; returns it without prefixes."""
        ended = not data
        if self._report is not None:
            data = self._until_report(data)
        shown = data
        if self._lines is not None:
            shown = self._lines.feed(data) + (self._lines.flush() if ended else b"")
        _write(self._target, shown)
        if ended:
            self._pipe.close()
        return data

    def _until_report(self, data: bytes) -> bytes:
        """What is not the report; held back until it has come."""
        assert self._report is not None
        self._before += data
        start = self._before.find(_MARK)
        end = self._before.find(b"\n", start + 1) if start >= 0 else -1
        if end >= 0:
            self._report(self._before[start + len(_MARK) : end].decode())
            self._report = None
            data, self._before = self._before[:start] + self._before[end + 1 :], b""
            return data
        if not data:
            rest, self._before = self._before, b""
            return rest
        return b""


def _write(descriptor: int, data: bytes) -> None:
    try:
        while data:
            data = data[os.write(descriptor, data) :]
    except OSError:
        pass  # Whoever read it is gone; the job matters more.
