"""What the scripts did, as a table in text or Markdown."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

HEADER = ("script", "undistributed", "one worker", "two workers", "equal losses", "note")
TOLERANCE = 1e-3


def row(name: str, outcomes: Sequence[dict[str, Any]]) -> tuple[str, ...]:
    """A script's line of the table.

    Args:
        name: of the script.
        outcomes: undistributed, with one worker and with two, and, if they differ, undistributed
            with weights that differ by rounding; each a runner's result with its `state`: "ok",
            "error" or "no end".
    """
    compared = outcomes[:3]
    notes = [o["error"].partition(". ")[0] for o in compared if o["error"]][-1:]
    if not outcomes[0]["logs"]:
        equal = "no `fit`"
    elif any(o["state"] != "ok" for o in compared):
        equal = "-"
    elif differs(outcomes):
        equal = "no"
        notes.append(_difference(outcomes))
    else:
        equal = "yes"
    return (name, *(o["state"] for o in compared), equal, "; ".join(notes))


def differs(outcomes: Sequence[dict[str, Any]]) -> bool:
    """Whether the results of workers differ from those of one process."""
    alone = outcomes[0]["logs"]
    return any(o["state"] == "ok" and distance(alone, o["logs"]) > TOLERANCE for o in outcomes[1:3])


def _difference(outcomes: Sequence[dict[str, Any]]) -> str:
    alone = outcomes[0]["logs"]
    one, two, *rounded = (f"{distance(alone, o['logs']):.0e}" for o in outcomes[1:])
    note = f"by {one} with one worker, {two} with two"
    if not rounded or outcomes[3]["state"] != "ok":
        return note
    return f"{note}; rounded weights change one process by {rounded[0]}"


def distance(expected: Any, actual: Any) -> float:
    """The largest relative difference between two nests of numbers; infinite for other forms."""
    if isinstance(expected, dict) and isinstance(actual, dict):
        expected, actual = sorted(expected.items()), sorted(actual.items())
    if isinstance(expected, (list, tuple)) and isinstance(actual, (list, tuple)):
        if len(expected) != len(actual):
            return math.inf
        return max((distance(*pair) for pair in zip(expected, actual, strict=True)), default=0.0)
    if isinstance(expected, str) or isinstance(actual, str):
        return 0.0 if expected == actual else math.inf
    if math.isnan(expected) and math.isnan(actual):
        return 0.0
    if math.isnan(expected) or math.isnan(actual):
        return math.inf
    return abs(expected - actual) / max(1e-3, abs(expected))


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [HEADER, ["---"] * len(HEADER), *rows]
    return "\n".join(
        "| " + " | ".join(c.replace("|", "\\|") for c in line) + " |" for line in lines
    )


def text(rows: Sequence[Sequence[str]]) -> str:
    """The same with columns that are aligned."""
    lines = [HEADER, *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(HEADER) - 1)]
    return "\n".join(
        "  ".join([*(c.ljust(w) for c, w in zip(line, widths, strict=False)), line[-1]]).rstrip()
        for line in lines
    )
