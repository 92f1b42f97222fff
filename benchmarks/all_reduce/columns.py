"""Tables for the terminal."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any


def align(lines: Sequence[Sequence[str]]) -> list[str]:
    """Formats lines of cells in right-aligned columns."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return [
        "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    ]


def format_rows(
    rows: Sequence[Mapping[str, Any]],
    columns: Mapping[str, str],
    cell: Callable[[str, Any], str],
) -> str:
    """Formats rows in aligned columns; a row without figures shows the reason.

    Args:
        rows: the values by column name; the reason of a failure is under `missing`.
        columns: the headings by column name.
        cell: formats a value, given its column name and the value; None if a row lacks the value.
    """
    lines = [list(columns.values())]
    lines += [[cell(name, row.get(name)) for name in columns] for row in rows]
    texts = align(lines)
    for i, row in enumerate(rows, start=1):
        if "missing" in row:
            texts[i] += f"  missing: {row['missing']}"
    return "\n".join(texts)
