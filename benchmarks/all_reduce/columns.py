"""Formats tables for the terminal."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any


def align(lines: Sequence[Sequence[str]]) -> list[str]:
    """Formats lines of cells as a table, and right-aligns its columns."""
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
    """Formats rows as a table with aligned columns.

    Args:
        rows: for each row, its values by column name. If the measurement of a row failed, the row
            contains the reason under `missing`, and the table shows this reason.
        columns: the heading of each column, by column name.
        cell: a function that takes a column name and a value, and returns the text of the cell. The
            value is None if the row has no value for the column.
    """
    lines = [list(columns.values())]
    lines += [[cell(name, row.get(name)) for name in columns] for row in rows]
    texts = align(lines)
    for i, row in enumerate(rows, start=1):
        if "missing" in row:
            texts[i] += f"  missing: {row['missing']}"
    return "\n".join(texts)
