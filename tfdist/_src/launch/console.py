"""The launcher's messages: one line at a time, on stderr, prefixed with the command's name."""

from __future__ import annotations

import sys


def say(text: str, *, below_output: bool = False) -> None:
    """Prints one message of the launcher.

    Args:
        text: the message, one or several lines, without the prefix.
        below_output: whether the chief may have left an unfinished line in the terminal, such as a
            progress bar; if so, starts a new line.
    """
    start = "\n" if below_output and sys.stderr.isatty() else ""
    try:
        print(f"{start}tfdist run: {text}", file=sys.stderr, flush=True)
    except (OSError, ValueError):
        pass  # Stderr is closed, here or by its reader; the job matters more than the message.


def announce(line: str) -> None:
    """Prints a line of what workers and launchers share, which names itself `tfdist`."""
    say(line.removeprefix("tfdist: "), below_output=True)
