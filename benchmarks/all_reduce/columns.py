"""Tables for the terminal."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any


def align(lines: Sequence[Sequence[str]]) -> list[str]:
    """Lines of cells, each column as wide as its widest cell and flush right."""
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
    """Rows in aligned columns; the reason in place of figures that are missing.

    Args:
        rows: by the columns' names; one that failed says why under `missing`.
        columns: names, and what stands above.
        cell: what to write for a name and its value, which is None where a row has none.
    """
    lines = [list(columns.values())]
    lines += [[cell(name, row.get(name)) for name in columns] for row in rows]
    texts = align(lines)
    for i, row in enumerate(rows, start=1):
        if "missing" in row:
            texts[i] += f"  missing: {row['missing']}"
    return "\n".join(texts)
