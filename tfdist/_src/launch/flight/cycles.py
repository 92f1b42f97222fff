"""Cycles among the workers that wait for one another."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from tfdist._src.launch.flight.findings import Cycle, Link


@dataclass(frozen=True)
class Edge:
    """That a worker waits for another one, and when, in nanoseconds of the shared time."""

    link: Link
    since: int
    until: int


def find_cycles(edges: Sequence[Edge]) -> list[Cycle]:
    """Finds cycles that share no worker: at least one if there is any.

    Those whose waits are not at the same time do not count: they come from logs that were written
    at different times.
    """
    into: dict[str, list[str]] = defaultdict(list)
    ways: dict[str, int] = defaultdict(int)
    for edge in edges:
        into[edge.link.waits_for].append(edge.link.worker)
        ways[edge.link.worker] += 1
    # What remains when workers that wait for nobody are taken away, again and again, is on a cycle
    # or leads to one.
    free = [worker for worker in into if not ways[worker]]
    for worker in free:  # grows
        for waiting in into[worker]:
            ways[waiting] -= 1
            if not ways[waiting]:
                free.append(waiting)
    taken = set(free)
    following = {e.link.worker: e for e in reversed(edges) if e.link.waits_for not in taken}
    return [cycle for cycle in _walk(following) if cycle is not None]


def _walk(following: dict[str, Edge]) -> list[Cycle | None]:
    found = []
    visited: set[str] = set()
    for start in sorted(following):
        path: dict[str, Edge] = {}
        worker = start
        while worker not in visited:
            visited.add(worker)
            path[worker] = following[worker]
            worker = following[worker].link.waits_for
        if worker in path:
            found.append(_cycle(list(path.values())[list(path).index(worker) :]))
    return found


def _cycle(edges: list[Edge]) -> Cycle | None:
    together = max(edge.since for edge in edges) < min(edge.until for edge in edges)
    return Cycle(tuple(edge.link for edge in edges)) if together else None
