"""Tables for the terminal."""

from __future__ import annotations

from collections.abc import Sequence


def align(lines: Sequence[Sequence[str]]) -> list[str]:
    """Lines of cells, each column as wide as its widest cell and flush right."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return [
        "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    ]
