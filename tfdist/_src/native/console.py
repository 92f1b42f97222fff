"""Messages about compilation: single lines on stderr."""

from __future__ import annotations

import sys


def say(text: str) -> None:
    """Writes a line at once, so that the lines of several workers do not mix."""
    try:
        sys.stderr.write(f"tfdist: {text}\n")
        sys.stderr.flush()
    except OSError:
        pass  # The reader of stderr is gone.
