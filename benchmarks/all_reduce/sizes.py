"""Sizes in bytes as people write them: `4KiB`, `64MiB`, `1000`."""

from __future__ import annotations

import re

UNITS = {"": 1, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


def parse_size(text: str) -> int:
    """Returns the number of bytes of a size.

    Args:
        text: digits and a unit of `UNITS`, such as `"64MiB"`.

    Raises:
        ValueError: the text is not a size, or not a whole number of float32 elements.
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
    """Formats a size in the largest unit that divides it."""
    unit = max((u for u in UNITS if u and size % UNITS[u] == 0), key=UNITS.__getitem__)
    return f"{size // UNITS[unit]} {unit}"
