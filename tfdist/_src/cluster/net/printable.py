"""Makes texts of other processes safe to print."""

from __future__ import annotations


def printable(text: str) -> str:
    """The text with a question mark for each character that is not printable.

    Example:
        >>> printable("a\\tb")
        'a?b'
    """
    return "".join(c if c.isprintable() else "?" for c in text)
