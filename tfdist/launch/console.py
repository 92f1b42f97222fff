"""What the launcher itself says: one line at a time, on stderr, under the command's name."""

from __future__ import annotations

import sys


def say(text: str, *, below_output: bool = False) -> None:
    """Prints one message of the launcher.

    Args:
        text: the message, one or several lines, without the command's name.
        below_output: whether the chief may have left half a line at the terminal, such as a
            progress bar; then a new line is begun.
    """
    start = "\n" if below_output and sys.stderr.isatty() else ""
    try:
        print(f"{start}tfdist run: {text}", file=sys.stderr, flush=True)
    except OSError:
        pass  # Whoever read stderr has gone; the job matters more than the message.
