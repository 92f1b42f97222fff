"""Finds the worker that keeps the others waiting, from the measurements of all workers."""

from __future__ import annotations

import enum
import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tfdist._src import native

USUAL_FACTOR = 1.3
"""How many times the median of the others counts as slow, unless somebody asks for another."""

# A delay below this share of a step is not worth a line.
_NOTICEABLE = 0.05
# Below this time with data on its way, a link's rate says little; the same holds for a link that
# carries less than this share of what the busiest one does, as only small messages go over it.
LEAST_BUSY_SECONDS = 0.001
_LEAST_SHARE = 0.1
# Where a host has links to several others, one of them has to be slower than this, times the
# factor, to be named alone.
_ALONE = 3.0
# A thread that is told of messages late, as its processor is busy, is no queue on the network: they
# take at least so long, and so many times as long as the other way.
_LEAST_QUEUE_SECONDS = 0.005
_QUEUE_FACTOR = 3.0
# Links are compared only where data moves for at least this share of a step.
_MOVES = 0.1


class Cause(enum.Enum):
    """What is slow on a worker."""

    INPUT = "input"
    COMPUTE = "compute"
    NETWORK = "network"


@dataclass(frozen=True)
class Traffic:
    """What has moved on a link.

    Attributes:
        bytes: that have been sent, and have come.
        busy: seconds that some of them were on their way.
        delay: mean seconds that a small message took the other way.
    """

    bytes: float
    busy: float
    delay: float = 0.0


@dataclass(frozen=True)
class Measurement:
    """A worker's means over some steps. Times are seconds per step.

    Attributes:
        step: the whole step.
        input: waiting for the next batch.
        workers: waiting for other workers.
        network: waiting for data to move.
        best_rate: bytes per second to the host to which it sends fastest, while something is on its
            way; 0 if it has no links to other hosts, or has sent too little.
        slowest_peer: a worker of the host to which it sends slowest; -1 for none.
        slowest_rate: bytes per second to that host.
        hosts: to how many hosts it has sent enough to tell.
        delay: seconds that small messages took from where they took longest.
    """

    step: float
    input: float
    workers: float
    network: float
    best_rate: float = 0.0
    slowest_peer: int = -1
    slowest_rate: float = 0.0
    hosts: int = 0
    delay: float = 0.0

    @classmethod
    def with_links(
        cls,
        step: float,
        data: float,
        workers: float,
        network: float,
        links: Mapping[int, Traffic],
        hosts: Sequence[int],
    ) -> Measurement:
        """The same, from what was sent on each link.

        Args:
            step, data, workers, network: as above.
            links: what has moved to and from each rank of another host.
            hosts: for each rank, a number of its host.
        """
        most = max((link.bytes for link in links.values()), default=0.0)
        fastest: dict[int, tuple[float, int]] = {}  # the rate and the rank, by host
        for rank, link in links.items():
            if link.busy >= LEAST_BUSY_SECONDS and link.bytes >= max(1.0, _LEAST_SHARE * most):
                found = (link.bytes / link.busy, rank)
                fastest[hosts[rank]] = max(found, fastest.get(hosts[rank], found))
        rate, peer = min(fastest.values(), default=(0.0, -1))
        best = max(fastest.values(), default=(0.0, -1))[0]
        delay = max((link.delay for link in links.values()), default=0.0)
        return cls(step, data, workers, network, best, peer, rate, len(fastest), delay)

    @classmethod
    def of(cls, values: Sequence[float]) -> Measurement:
        """The same, from its values in order, all of which may have become floats."""
        step, data, workers, network, best, peer, rate, hosts, delay = values
        return cls(step, data, workers, network, best, int(peer), rate, int(hosts), delay)

    @property
    def compute(self) -> float:
        """The rest: the computation, callbacks, and whatever else the process does."""
        return max(0.0, self.step - self.input - self.workers - self.network)


@dataclass(frozen=True)
class Straggler:
    """A worker that keeps the others waiting.

    Attributes:
        rank: its rank.
        cause: what is slow.
        own: its own value: seconds per step, or bytes per second for the network.
        others: the median of the other workers.
        cost: seconds of a step by which the others' would be shorter if this one was as fast as
            they are, at most.
        peer: None, or the worker to which it sends slowly, where nothing tells which of the two has
            the slow network.
        queues: whether the two values are seconds instead that small messages take to `peer`, and
            back.
    """

    rank: int
    cause: Cause
    own: float = field(compare=False)
    others: float = field(compare=False)
    cost: float = field(compare=False)
    peer: int | None = None
    queues: bool = field(default=False, compare=False)


def find(
    measured: Sequence[Measurement], factor: float, hosts: Sequence[int] = ()
) -> Straggler | None:
    """Finds the worker that keeps the others waiting.

    A worker's own time is what remains of its step without its waiting for other workers and for
    data: it is longest on the worker that the others wait for, while the step is equally long on
    all. Hosts are compared by what they send: one that sends slowly to all others, or to which all
    others send slowly, has a slow network. Where a host sends to one other host only, as between
    two hosts and in a ring, that cannot be told, and the workers at both ends are named. Between
    two hosts both directions may carry equally little, as acknowledgments queue behind the data of
    the slow one: where small messages take longer one way, that is the slow one. If a worker and a
    network are slow, the one that costs more of a step is named.

    Args:
        measured: of each worker, by rank.
        factor: how many times the median of the others counts as slow.
        hosts: for each worker a number of its host; by default each is on its own.

    Example:
        >>> fast, slow = Measurement(0.1, 0.0, 0.06, 0.01), Measurement(0.1, 0.06, 0.0, 0.01)
        >>> find([fast, slow, fast], factor=1.3).cause
        <Cause.INPUT: 'input'>
    """
    return costlier(find_slow_process(measured, factor), find_slow_link(measured, factor, hosts))


def costlier(process: Straggler | None, link: Straggler | None) -> Straggler | None:
    """Of a slow process and a slow link, if there are both, the one that costs the others more."""
    if process is None or link is None:
        return process or link
    return max(process, link, key=lambda found: found.cost)


def find_slow_process(measured: Sequence[Measurement], factor: float) -> Straggler | None:
    """Of `find`, the comparison of the workers' own times."""
    if len(measured) < 2:
        return None
    own = [m.input + m.compute for m in measured]
    rank = max(range(len(own)), key=own.__getitem__)
    usual = _median_of_others(own, rank)
    slowest = measured[rank]
    if own[rank] < factor * usual or own[rank] - usual < _NOTICEABLE * slowest.step:
        return None
    by_cause = {
        Cause.INPUT: [m.input for m in measured],
        Cause.COMPUTE: [m.compute for m in measured],
    }
    cause = max(by_cause, key=lambda c: by_cause[c][rank] - _median_of_others(by_cause[c], rank))
    values = by_cause[cause]
    return Straggler(
        rank, cause, values[rank], _median_of_others(values, rank), cost=own[rank] - usual
    )


def find_slow_link(
    measured: Sequence[Measurement], factor: float, hosts: Sequence[int] = ()
) -> Straggler | None:
    """Of `find`, the comparison of links."""
    linked = [rank for rank, m in enumerate(measured) if m.best_rate > 0]
    if len(linked) < 2 or max(m.network / m.step for m in measured if m.step > 0) < _MOVES:
        return None
    host_of = hosts or range(len(measured))
    by_host: dict[int, list[int]] = {}
    for rank in linked:
        by_host.setdefault(host_of[rank], []).append(rank)
    if len(by_host) < 2:
        return None
    if len(by_host) == 2 and (queue := _find_queue(measured, factor, *by_host.values())):
        return queue
    best = {h: max(measured[r].best_rate for r in ranks) for h, ranks in by_host.items()}
    # Others of the host send small messages only, which take longer for their size.
    slowest = {
        host: min(
            (r for r in ranks if factor * measured[r].best_rate >= best[host]),
            key=lambda r: measured[r].slowest_rate,
        )
        for host, ranks in by_host.items()
    }
    slow = min(best, key=best.__getitem__)
    usual = statistics.median_low(rate for host, rate in best.items() if host != slow)
    if factor * best[slow] < usual:
        rank = max(by_host[slow], key=lambda r: measured[r].best_rate)
        several = max(measured[r].hosts for r in by_host[slow]) > 1
        peer = None if several else measured[rank].slowest_peer
        return _slow_link(measured, rank, best[slow], usual, peer)
    # By the accused host: those that send to it slower than to another one.
    accusers: dict[int, list[int]] = {}
    for host, rank in slowest.items():
        if factor * measured[rank].slowest_rate < best[host]:
            accusers.setdefault(host_of[measured[rank].slowest_peer], []).append(rank)
    for accused, ranks in sorted(accusers.items()):
        others = [host for host in by_host if host != accused]
        if len(ranks) == len(others) > 1:
            return _slow_link(
                measured,
                min(measured[r].slowest_peer for r in ranks),
                statistics.median(measured[r].slowest_rate for r in ranks),
                statistics.median(best[host] for host in others),
            )
    rank = min(slowest.values(), key=lambda r: measured[r].slowest_rate)
    rate, usual = measured[rank].slowest_rate, statistics.median(best.values())
    if _ALONE * factor * rate < usual:
        return _slow_link(measured, rank, rate, usual, measured[rank].slowest_peer)
    return None


def _slow_link(
    measured: Sequence[Measurement], rank: int, rate: float, usual: float, peer: int | None = None
) -> Straggler:
    """A link that carries so little, where data moves for so long."""
    cost = max(m.network for m in measured) * (1.0 - rate / usual)
    return Straggler(rank, Cause.NETWORK, rate, usual, cost, peer)


def _find_queue(
    measured: Sequence[Measurement], factor: float, one: Sequence[int], other: Sequence[int]
) -> Straggler | None:
    """The direction in which data queues, between the ranks of two hosts."""
    ends = [max(ranks, key=lambda r: measured[r].delay) for ranks in (one, other)]
    back, there = sorted(ends, key=lambda r: measured[r].delay)
    delay, usual = measured[there].delay, measured[back].delay
    if (
        delay < max(_LEAST_QUEUE_SECONDS, max(factor, _QUEUE_FACTOR) * usual)
        or delay - usual < _NOTICEABLE * measured[there].step
    ):
        return None
    sender = measured[there].slowest_peer
    cost = max(m.network for m in measured) * (1.0 - usual / delay)
    return Straggler(sender, Cause.NETWORK, delay, usual, cost, peer=there, queues=True)


def _median_of_others(values: Sequence[float], rank: int) -> float:
    return statistics.median_high(value for r, value in enumerate(values) if r != rank)


_REMEDIES = {
    Cause.INPUT: "Look at how it reads and prepares its data: its disk, and `prefetch`, "
    "`cache` and `num_parallel_calls` of the dataset.",
    Cause.COMPUTE: "Look for other programs on its host, for throttled cores or clocks, and for "
    "callbacks that only it runs.",
    Cause.NETWORK: "Look at the network of its host.",
}
_BETWEEN = "Look at the network between them."


def describe(straggler: Straggler, name: Callable[[int], str]) -> str:
    """What a straggler does to the others, and where to look, in sentences.

    Args:
        straggler: what was found.
        name: what to call a worker, by rank.
    """
    if straggler.queues:
        return (
            f"{subject(straggler, name)} keep the others waiting: data queues there, and small "
            f"messages take {1e3 * straggler.own:.1f} ms, but {1e3 * straggler.others:.1f} ms the "
            f"other way. {_BETWEEN}"
        )
    usual = f"where the median of the others is {straggler.others / 1e6:.3g} MB/s"
    rates = f"{straggler.own / 1e6:.3g} MB/s while they send, {usual}"
    if straggler.peer is not None:
        return f"{subject(straggler, name)} keep the others waiting: they carry {rates}. {_BETWEEN}"
    if straggler.cause is Cause.NETWORK:
        what = f"its connections to other hosts carry {rates}"
    else:
        kind = "input" if straggler.cause is Cause.INPUT else "computation"
        what = (
            f"its {kind} takes {1e3 * straggler.own:.1f} ms of a step, where the median of the "
            f"others is {1e3 * straggler.others:.1f} ms"
        )
    remedy = _REMEDIES[straggler.cause]
    return f"{subject(straggler, name)} keeps the others waiting: {what}. {remedy}"


def describe_end(straggler: Straggler, name: Callable[[int], str]) -> str:
    """That a straggler is none any more, as a sentence."""
    keep = "keeps" if straggler.peer is None else "keep"
    return f"{subject(straggler, name)} no longer {keep} the others waiting."


def subject(straggler: Straggler, name: Callable[[int], str]) -> str:
    """The worker, or the connections between two of them."""
    if straggler.peer is None:
        return name(straggler.rank)
    return f"The connections from {name(straggler.rank)} to {name(straggler.peer)}"


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
