"""Lines of a worker's output: complete ones to show after its rank, and the last ones of a file."""

from __future__ import annotations

import os
from pathlib import Path

_LONGEST_LINE = 65536
_TAIL_BYTES = 65536
_TAIL_WIDTH = 500


class LineAssembler:
    """Makes complete lines, each after a prefix, from output that comes in pieces.

    Of a line that a carriage return rewrites, as a progress bar does, the last state is kept. A
    line of more than 64 KiB is broken.

    Args:
        prefix: what to put before each line.

    Example:
        >>> lines = LineAssembler("[1] ")
        >>> lines.feed(b"1/2\\r2/2\\nsav"), lines.feed(b"ed\\n")
        (b'[1] 2/2\\n', b'[1] saved\\n')
    """

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix.encode()
        self._rest = b""

    def feed(self, data: bytes) -> bytes:
        """Takes output, and returns the lines that are complete now, prefixed."""
        *lines, rest = (self._rest + data).split(b"\n")
        while len(rest) > _LONGEST_LINE:
            lines.append(rest[:_LONGEST_LINE])
            rest = rest[_LONGEST_LINE:]
        self._rest = rest
        return b"".join(self._prefix + _last_state(line) + b"\n" for line in lines)

    def flush(self) -> bytes:
        """Returns what is left at the end as a line, b"" if nothing is."""
        return self.feed(b"\n") if self._rest else b""


def last_lines(path: Path, count: int) -> list[str]:
    """The last lines of a file, each cut to 500 characters.

    Args:
        path: the file; one that is missing or not UTF-8 is no error.
        count: how many lines at most.
    """
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            data = file.read()
    except OSError:
        return []
    lines = data.rstrip().split(b"\n")[-count:] if data.strip() else []
    return [_last_state(line).decode(errors="replace")[:_TAIL_WIDTH] for line in lines]


def _last_state(line: bytes) -> bytes:
    return line.rstrip(b"\r").rpartition(b"\r")[2]
