"""Parses and formats sizes in bytes, such as `4KiB`, `64MiB` or `1000`."""

from __future__ import annotations

import re

UNITS = {"": 1, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


def parse_size(text: str) -> int:
    """Converts a size such as `"64MiB"` to a number of bytes.

    Args:
        text: digits, followed by a key of `UNITS`.

    Raises:
        ValueError: the text is not a size, or the number of bytes is not a positive multiple of 4,
            the size of a float32 element.
    """
    match = re.fullmatch(r"(\d+) ?(\w*)", text.strip())
    if not match or match[2] not in UNITS:
        raise ValueError(
            f"A size is a number of bytes with or without KiB, MiB or GiB. Received: {text!r}. "
            "Write for example 64MiB."
        )
    size = int(match[1]) * UNITS[match[2]]
    if size < 4 or size % 4:
        raise ValueError(
            f"A size is that of some float32 elements, so a multiple of 4 bytes. Received: {text!r}"
        )
    return size


def format_size(size: int) -> str:
    """Formats a number of bytes in the largest unit that divides it."""
    unit = max((u for u in UNITS if u and size % UNITS[u] == 0), key=UNITS.__getitem__)
    return f"{size // UNITS[unit]} {unit}"
