"""The clocks of several hosts brought together."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tfdist._src.launch.flight.log import Log

# By how much the Unix time of two hosts may differ, where their clocks were not compared.
_UNIX_DOUBT_NS = 1_000_000_000


@dataclass(frozen=True)
class Clock:
    """How a log's times translate to those that all logs share, Unix time of one of the hosts.

    Attributes:
        shift_ns: to be added to a time of the log's steady clock.
        doubt_ns: how far off that may be.
        island: a number that logs share whose clocks were compared, directly or through others.
    """

    shift_ns: int
    doubt_ns: int
    island: int


def doubt_ns(one: Clock, other: Clock) -> int:
    """How far off the time between two moments may be that were taken by these clocks."""
    if one is other:
        return 0
    islands = 0 if one.island == other.island else _UNIX_DOUBT_NS
    return one.doubt_ns + other.doubt_ns + islands


def compare(logs: Sequence[Log]) -> list[Clock]:
    """Finds the clock of each log.

    Measured offsets are used where they connect two logs, over as few hosts as possible; workers of
    one host have the same steady clock. Unix time connects the rest.
    """
    index = {log.worker: i for i, log in enumerate(logs)}
    edges: dict[int, list[tuple[int, int, int]]] = defaultdict(list)
    for i, log in enumerate(logs):
        for worker, offset, uncertainty in _offsets(log):
            j = index.get(worker, i)
            if j != i:
                edges[i].append((j, offset, uncertainty))
                edges[j].append((i, -offset, uncertainty))
    clocks: dict[int, Clock] = {}
    for first, log in enumerate(logs):
        if first in clocks:
            continue
        clocks[first] = Clock(log.unix_ns - log.steady_ns, 0, first)
        waiting = deque([first])
        while waiting:
            i = waiting.popleft()
            for j, offset, uncertainty in sorted(edges[i], key=lambda edge: edge[2]):
                if j not in clocks:
                    doubt = clocks[i].doubt_ns + uncertainty
                    clocks[j] = Clock(clocks[i].shift_ns - offset, doubt, first)
                    waiting.append(j)
    return [clocks[i] for i in range(len(logs))]


def _offsets(log: Log) -> Iterable[tuple[str, int, int]]:
    """The workers whose clocks are known from this one: name, offset, uncertainty."""
    for group in log.communicators:
        own = group.hosts[group.rank]
        for peer in group.peers:
            if group.hosts[peer.rank] == own:
                yield group.ranks[peer.rank], 0, 0
            elif peer.clock_offset_ns is not None:
                uncertainty = peer.clock_uncertainty_ns or 0
                yield group.ranks[peer.rank], peer.clock_offset_ns, uncertainty
