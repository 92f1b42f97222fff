"""Compares the outcome of a cell on a worker with that in one process."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

from tests.guides.table import distance

Outcome = dict[str, Any]  # A cell's `source`, `error`, `logs`, `printed` and `models`.

# The line that an error names, within which the cell works.
REMEDY = "with strategy.scope():"
_NUMBER = re.compile(r"(?<![\w.])[-+]?\d+(?:\.\d*)?(?:[eE][-+]?\d+)?")
SAME = "same"
_ROUNDING = 10  # One run with rounded weights is a sample of what rounding may change.


def verdict(alone: Outcome, worker: Outcome, rounded: Outcome) -> str:
    """Returns what to say of a cell: that it "differs", or something else.

    Args:
        alone: the outcome in one process.
        worker: that on a worker.
        rounded: that in one process whose initial weights differ by rounding.
    """
    found = difference(alone, worker)
    if found and by_rounding(alone, worker, rounded):
        return "same to rounding"
    return f"differs: {found}" if found else note(alone, worker)


def difference(alone: Outcome, worker: Outcome) -> str:
    """Returns how a cell differs on a worker from one process, or an empty text."""
    if refusal := refused(alone, worker):
        return refusal
    for (name, expected), (other, found) in zip(alone["logs"], worker["logs"], strict=False):
        if name != other:
            return f"calls {other} instead of {name}"
        if not _close(expected, found):
            return f"{name} gives {found} instead of {expected}"
    if worker["error"] and not alone["error"]:
        return worker["error"]
    if not alone["error"] and len(alone["logs"]) != len(worker["logs"]):
        return f"{len(worker['logs'])} calls instead of {len(alone['logs'])}"
    if same_text(alone, worker) and not _close(*map(_numbers, (alone, worker))):
        return f"prints {worker['printed'][:300]!r} instead of {alone['printed'][:300]!r}"
    return ""


def by_rounding(alone: Outcome, worker: Outcome, rounded: Outcome) -> bool:
    """Returns whether a cell's numbers differ no more than rounded weights change one process.

    Args:
        alone: the outcome in one process.
        worker: that on a worker.
        rounded: that in one process whose initial weights differ by rounding.
    """
    if refused(alone, worker) or worker["error"] != alone["error"] or not same_text(alone, worker):
        return False
    numbers = [[outcome["logs"], _numbers(outcome)] for outcome in (alone, worker, rounded)]
    found, allowed = (distance(numbers[0], other) for other in numbers[1:])
    return found < math.inf and found <= _ROUNDING * allowed


def note(alone: Outcome, worker: Outcome) -> str:
    """Returns what to say of a cell that does not differ."""
    if alone["error"]:
        found = worker["error"]
        ending = "" if found.partition(":")[0] == alone["error"].partition(":")[0] else found
        also = f"; on workers: {ending[:200] or 'it runs'}" if ending or not found else ""
        return f"does not run in one process: {alone['error'][:200]}{also}"
    if not same_text(alone, worker):
        return f"same, but prints {worker['printed'][:100]!r} and not {alone['printed'][:100]!r}"
    return SAME


def refused(alone: Outcome, worker: Outcome) -> str:
    """Returns the error on a worker that names a line as its remedy, or an empty text."""
    expected = {alone["error"], *_errors(alone)}
    for error in (*_errors(worker), worker["error"]):
        if f"`{REMEDY}`" in error and error not in expected:
            return str(error)
    return ""


def to_scope(alone: Sequence[Outcome], worker: Sequence[Outcome]) -> list[int]:
    """Returns the cells that create the models that a worker refuses to train."""
    scoped = set()
    for number, pair in enumerate(zip(alone, worker, strict=True)):
        if refused(*pair):
            scoped.add(_maker(worker, number))
    return sorted(scoped)


def _maker(worker: Sequence[Outcome], number: int) -> int:
    """Returns the last cell that creates a model that a cell names, or the cell itself."""
    source = worker[number]["source"]
    for earlier in range(number, -1, -1):
        if any(re.search(rf"\b{name}\b", source) for name in worker[earlier]["models"]):
            return earlier
    return number


def same_text(alone: Outcome, worker: Outcome) -> bool:
    """Returns whether two outcomes have printed the same, besides numbers."""
    one, two = (_text(outcome["printed"]) for outcome in (alone, worker))
    return one == two


def _text(printed: str) -> str:
    printed = re.sub(r"\btmp\w{8}\b|0x[0-9a-f]+", "", printed)
    return " ".join(_NUMBER.sub("0", printed).split())


def _numbers(outcome: Outcome) -> list[float]:
    printed = re.sub(r"\btmp\w{8}\b|0x[0-9a-f]+", "", outcome["printed"])
    return [float(number) for number in _NUMBER.findall(printed)]


def _errors(outcome: Outcome) -> list[str]:
    return [log["error"] for _, log in outcome["logs"] if isinstance(log, dict) and "error" in log]


def _close(expected: Any, found: Any, tolerance: float = 1e-4) -> bool:
    import numpy as np

    if isinstance(expected, dict) and isinstance(found, dict):
        same = expected.keys() == found.keys()
        # Rounding changes which of two nearly equal outputs is the largest.
        tolerances = {name: 1e-3 if "accuracy" in name else tolerance for name in expected}
        return same and all(_close(expected[n], found[n], t) for n, t in tolerances.items())
    if isinstance(expected, str) or isinstance(found, str):
        return bool(expected == found)
    same = np.shape(expected) == np.shape(found)
    close = same and np.allclose(expected, found, rtol=tolerance, atol=tolerance, equal_nan=True)
    return bool(close)
