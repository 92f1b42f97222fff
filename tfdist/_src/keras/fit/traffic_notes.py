"""Notes the values that a training step communicates, for the flight log and for a hint."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import keras

from tfdist._src.cluster.net.wait_messages import say
from tfdist._src.comm import flight_log
from tfdist._src.global_view.analysis import Analysis
from tfdist._src.global_view.explain import transfers
from tfdist._src.global_view.transfer import Transfer, bytes_text, largest_first, total
from tfdist._src.internals.tensorflow import get_current_replica_id_as_int

_MOST_SHOWN = 50
_SMALL = 64 << 10

# Of models whose last trace has not run yet: notes it again, with the number of rows.
_pending: dict[str, Callable[[int], None]] = {}
_hinted: set[str] = set()


def note_trace(model: keras.Model, analysis: Analysis, rows: int | None) -> None:
    """Notes a training step that has been traced. Never fails.

    Args:
        model: the model.
        analysis: its step.
        rows: the number of rows of the whole batch, if it is known. Otherwise, `note_rows` is
            expected after the first step.
    """
    if get_current_replica_id_as_int():
        return  # The replicas of a process trace the same.
    name, extended = model.name, model.distribute_strategy.extended
    program = ""

    def note(count: int | None) -> None:
        nonlocal program
        # A trace that has asked for the number of replicas does not outlast a change of the group.
        replicas = None if extended.group.elastic else extended.replica_count
        found = transfers(analysis, count, replicas)
        program = program or _hash_of(found)
        _note(model, found, count, program)

    _pending.pop(name, None)
    with contextlib.suppress(Exception):  # Training matters more.
        note(rows)
    if rows is None:
        _pending[name] = note


def note_rows(model: keras.Model, rows: int) -> None:
    """Notes the number of rows of a training step that has ended. Never fails.

    Args:
        model: the model.
        rows: those of the whole batch.
    """
    note = _pending.pop(model.name, None) if _pending else None
    if note is not None:
        with contextlib.suppress(Exception):
            note(rows)


def note_step(model: keras.Model, found: Sequence[Transfer], rows: int) -> None:
    """Notes what a training step communicates. Never fails.

    Args:
        model: the model.
        found: the values.
        rows: the number of rows of the whole batch.
    """
    with contextlib.suppress(Exception):
        _note(model, found, rows, _hash_of(found))


def _note(model: keras.Model, found: Sequence[Transfer], rows: int | None, program: str) -> None:
    flight_log.note_step(model.name, _described(found, rows, program))
    if rows is not None and model.distribute_strategy.extended.group.topology.is_chief:
        _hint(model.name, found, rows)


def _hash_of(found: Sequence[Transfer]) -> str:
    """A hash that is the same for equal programs, regardless of names."""
    values = [(one.kind, one.operation, one.shape, one.reason) for one in found]
    return hashlib.sha256(repr(values).encode()).hexdigest()[:16]


def _described(found: Sequence[Transfer], rows: int | None, program: str) -> dict[str, Any]:
    """A step as the flight log has it."""
    shown = largest_first(found)[:_MOST_SHOWN]
    return {
        "program": program,
        "rows": rows,
        "reduced_bytes": total(found, "reduce"),
        "gathered_bytes": total(found, "gather"),
        "sent_bytes": total(found, "send"),
        "unknown": sum(one.size is None for one in found),
        "transfers": [
            {
                "kind": one.kind,
                "operation": one.operation,
                "bytes": one.size,
                "shape": one.shape,
                "where": one.where,
                "reason": one.reason,
            }
            for one in shown
        ],
        "more": len(found) - len(shown),
    }


def _hint(name: str, found: Sequence[Transfer], rows: int) -> None:
    """Says once for a model if it gathers more than it reduces, apart from small values."""
    sizes = [(one.estimate(rows), one) for one in found]
    reduced = sum(size for size, one in sizes if one.kind == "reduce" or one.replaces_reduction)
    gathers = [
        (size, one)
        for size, one in sizes
        if size >= _SMALL and one.kind == "gather" and not one.replaces_reduction
    ]
    gathered = sum(size for size, _ in gathers)
    if gathered <= reduced or name in _hinted:
        return
    _hinted.add(name)
    size, largest = max(gathers, key=lambda pair: pair[0])
    reason = f" ({largest.reason})" if largest.reason else ""
    say(
        f"tfdist: A training step of {name!r} gathers {bytes_text(gathered)}, more than the "
        f"{bytes_text(reduced)} that it reduces. The largest value has {bytes_text(size)}, for "
        f"{largest.operation} at {largest.where}{reason}. `strategy.explain(model, batch)` prints "
        "all of them, and how to gather less."
    )
