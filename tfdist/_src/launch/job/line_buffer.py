"""Lines of a worker's output: complete prefixed lines from a stream, the last lines of a file."""

from __future__ import annotations

import os
from pathlib import Path

_LONGEST_LINE = 65536
_TAIL_BYTES = 65536
_TAIL_WIDTH = 500


class LineAssembler:
    """Assembles complete, prefixed lines from output that arrives in pieces.

    If a line is rewritten with carriage returns, as by a progress bar, only its last state is kept.
    A line longer than 64 KiB is split.

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
        """Adds output, and returns the lines that are now complete, prefixed."""
        *lines, rest = (self._rest + data).split(b"\n")
        while len(rest) > _LONGEST_LINE:
            lines.append(rest[:_LONGEST_LINE])
            rest = rest[_LONGEST_LINE:]
        self._rest = rest
        return b"".join(self._prefix + _last_state(line) + b"\n" for line in lines)

    def flush(self) -> bytes:
        """Returns the unfinished rest as a line, b"" if none."""
        return self.feed(b"\n") if self._rest else b""


def last_lines(path: Path, count: int, start: int = 0) -> list[str]:
    """The last lines of a file, each truncated to 500 characters.

    Args:
        path: the file, which may be missing or not UTF-8.
        count: the maximum number of lines.
        start: where in the file to begin.
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
