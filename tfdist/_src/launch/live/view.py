"""The live view as text for people, and as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict

from tfdist._src.launch.live.headline import doing, headline, waited_for
from tfdist._src.launch.live.ranks import Activity, Rank

_MOST_ROWS = 64
_COLUMNS = (
    "rank",
    "host",
    "steps",
    "steps/s",
    "input",
    "workers",
    "network",
    "sent/s",
    "shared/s",
    "memory",
    "now",
)
_LEFT = ("host", "now")
# Of the keys of the JSON object.
_FORMAT = 1


def to_text(ranks: Sequence[Rank], *, most: int | None = _MOST_ROWS) -> str:
    """The headline, and a table with a row for each rank, first those that others wait for.

    Args:
        ranks: all ranks of the job.
        most: how many rows; None for all.
    """
    causes = waited_for(ranks)
    # Stable: by rank where nothing else tells them apart.
    order = sorted(ranks, key=lambda one: (one not in causes, one.state == "answered"))
    rows = [_COLUMNS, *map(_row, order[:most])]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(map(_aligned, _COLUMNS, row, widths)).rstrip() for row in rows]
    more = len(order) - len(rows) + 1
    return "\n".join([headline(ranks), "", *lines, *([f"and {more} more: --all"] if more else [])])


def to_json(address: str, ranks: Sequence[Rank]) -> str:
    """The same as one JSON object; docs/monitoring.md lists its keys."""
    whole = {
        "format": _FORMAT,
        "job": address,
        "size": len(ranks),
        "headline": headline(ranks),
        "waited_for": [one.rank for one in waited_for(ranks)],
        "ranks": [{**asdict(one), "doing": doing(one)} for one in ranks],
    }
    return json.dumps(whole, indent=2)


def _row(rank: Rank) -> tuple[str, ...]:
    known = rank.activity
    numbers = _numbers(known) if known else ("-",) * (len(_COLUMNS) - 3)
    return (str(rank.rank), known.host if known else "-", *numbers, doing(rank))


def _numbers(known: Activity) -> tuple[str, ...]:
    return (
        str(known.steps),
        f"{known.steps_per_second:.3g}",
        *(f"{share:.0%}" for share in (known.input, known.workers, known.network)),
        _bytes(known.sent_per_second),
        _bytes(known.shared_per_second),
        _bytes(known.resident_bytes),
    )


def _bytes(count: float) -> str:
    """A number of bytes in three digits.

    Example:
        >>> _bytes(0), _bytes(1536), _bytes(1e9)
        ('0 B', '1.5 KiB', '954 MiB')
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1024
    return f"{count:.3g} TiB"


def _aligned(column: str, text: str, width: int) -> str:
    return f"{text:<{width}}" if column in _LEFT else f"{text:>{width}}"
