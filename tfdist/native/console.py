"""What compiling says to the user: single lines on stderr."""

from __future__ import annotations

import sys


def say(text: str) -> None:
    """Writes one line, in one piece so that the lines of several workers do not mix."""
    try:
        sys.stderr.write(f"tfdist: {text}\n")
        sys.stderr.flush()
    except OSError:
        pass  # Whoever read stderr has gone.
