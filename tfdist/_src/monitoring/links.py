"""What the kernel counts of the connections to other hosts, of all communicators together."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tfdist._src import native
from tfdist._src.monitoring.stragglers import Traffic


@dataclass(frozen=True)
class Counts:
    """The counts of the connections to a rank: of what this one sends, and of its messages.

    Attributes:
        acknowledged_bytes: sent, and known to have come.
        busy_us: microseconds with something on its way.
        pending_bytes: sent, and not known to have come.
        silent_ms: since the last acknowledgment, where some are pending.
        frames: messages about its state that have come from it.
        delay_us: microseconds that these were on their way, by the clocks of both; together.
    """

    acknowledged_bytes: int = 0
    busy_us: int = 0
    pending_bytes: int = 0
    silent_ms: int = 0
    frames: int = 0
    delay_us: int = 0


def communicators(records: int = 0) -> list[dict[str, Any]]:
    """The state of all communicators of this process, each with so many of its last records."""
    if not native.has_ops():
        return []
    found: list[dict[str, Any]] = json.loads(native.load().library.tfd_state(records, 0))
    return found


def by_rank(
    communicators: Sequence[Mapping[str, Any]], ranks: Mapping[str, int]
) -> dict[int, Counts]:
    """The counts by the job's rank at the other end.

    Gradients, the messages of pipelines, and what several devices reduce go over communicators, and
    so over connections, of their own.

    Args:
        communicators: as `communicators` returns them.
        ranks: the job's rank of each worker, by what messages call it.
    """
    found: dict[int, Counts] = {}
    for one in communicators:
        peers = {peer["rank"]: peer for peer in one["peers"]}
        for link in one["links"]:
            rank, peer = ranks.get(one["ranks"][link["rank"]]), peers[link["rank"]]
            if rank is not None:
                before = found.get(rank, Counts())
                silent = link["silent_ms"] if link["pending_bytes"] else 0
                found[rank] = Counts(
                    before.acknowledged_bytes + link["acknowledged_bytes"],
                    before.busy_us + link["busy_us"],
                    before.pending_bytes + link["pending_bytes"],
                    max(before.silent_ms, silent),
                    before.frames + peer["frames"],
                    before.delay_us + peer["delay_us"],
                )
    return found


def traffic(before: Mapping[int, Counts], now: Mapping[int, Counts]) -> dict[int, Traffic]:
    """What was sent to each rank between two moments, and how long messages from it took.

    Where a communicator has been closed meanwhile, its counts are missing, and what is less than
    before is not reported.
    """
    found = {}
    for rank, counts in now.items():
        earlier = before.get(rank, Counts())
        moved = counts.acknowledged_bytes - earlier.acknowledged_bytes
        busy = 1e-6 * (counts.busy_us - earlier.busy_us)
        frames = counts.frames - earlier.frames
        delay = 1e-6 * (counts.delay_us - earlier.delay_us)
        if moved >= 0 and busy >= 0 and frames >= 0:
            found[rank] = Traffic(moved, busy, max(0.0, delay) / max(1, frames))
    return found


def leader(communicators: Sequence[Mapping[str, Any]], ranks: Mapping[str, int], rank: int) -> int:
    """The first rank of the job that shares a host, and a communicator, with this one."""
    found = [rank]
    for one in communicators:
        own = one["hosts"][one["rank"]]
        of_host = (n for n, host in zip(one["ranks"], one["hosts"], strict=True) if host == own)
        found += [ranks[name] for name in of_host if name in ranks]
    return min(found)
