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
"""The default multiple of the other workers' median above which a worker counts as slow."""

# A delay below this share of a step is not worth reporting.
_NOTICEABLE = 0.05
# A rate is unreliable if data was in flight for less than this time, or if the link carried less
# than this share of the busiest link's bytes: such a link carries only small messages.
MIN_BUSY_SECONDS = 0.001
_MIN_SHARE = 0.1
# A single slow link is reported only if its rate, multiplied by this number and by `factor`, is
# still lower than the median of the hosts' best rates.
_ALONE = 3.0
# A small delay may have another reason: a busy CPU reads messages late. If data queues up in the
# network, the delay is at least this time, and at least this multiple of the delay in the other
# direction.
_MIN_QUEUE_SECONDS = 0.005
_QUEUE_FACTOR = 3.0
# Links are compared only if a worker waits for the network during at least this share of a step.
_MOVES = 0.1


class Cause(enum.Enum):
    """The part of a worker that is slow."""

    INPUT = "input"
    COMPUTE = "compute"
    NETWORK = "network"


@dataclass(frozen=True)
class Traffic:
    """Data transferred on a link.

    Attributes:
        bytes: bytes sent and acknowledged.
        busy: the seconds during which some of these bytes were in flight.
        delay: the mean time, in seconds, that a small message took in the opposite direction.
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
        best_rate: the highest rate at which this worker sends to another host, in bytes per second
            while data is in flight; 0 if the worker has no links to other hosts, or has sent too
            little data.
        slowest_peer: a worker on the host to which this worker sends at the lowest rate; -1 if no
            rate is known.
        slowest_rate: the rate to this host, in bytes per second.
        hosts: the number of hosts to which the rate is known.
        delay: the mean delay, in seconds, of small messages from the worker with the largest mean
            delay.
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
        """Makes a measurement from the traffic of each link.

        Args:
            step, data, workers, network: the times of `Measurement`; `data` becomes the attribute
                `input`.
            links: the traffic with each rank on another host.
            hosts: the number of the host of each rank.
        """
        most = max((link.bytes for link in links.values()), default=0.0)
        fastest: dict[int, tuple[float, int]] = {}  # for each host, the rate and the rank
        for rank, link in links.items():
            if link.busy >= MIN_BUSY_SECONDS and link.bytes >= max(1.0, _MIN_SHARE * most):
                found = (link.bytes / link.busy, rank)
                fastest[hosts[rank]] = max(found, fastest.get(hosts[rank], found))
        rate, peer = min(fastest.values(), default=(0.0, -1))
        best = max(fastest.values(), default=(0.0, -1))[0]
        delay = max((link.delay for link in links.values()), default=0.0)
        return cls(step, data, workers, network, best, peer, rate, len(fastest), delay)

    @classmethod
    def of(cls, values: Sequence[float]) -> Measurement:
        """Creates a measurement from its values in order, which may all be floats."""
        step, data, workers, network, best, peer, rate, hosts, delay = values
        return cls(step, data, workers, network, best, int(peer), rate, int(hosts), delay)

    @property
    def compute(self) -> float:
        """The time for the rest of the step: computation, callbacks, and all other work."""
        return max(0.0, self.step - self.input - self.workers - self.network)


@dataclass(frozen=True)
class Straggler:
    """A worker that keeps the others waiting.

    Attributes:
        rank: its rank.
        cause: its slow part.
        own: the value of this worker: seconds per step, or bytes per second if the network is slow.
        others: the median of the values of the other workers.
        cost: an upper bound, in seconds, on the time that the other workers would save in each step
            if this worker were as fast as they are.
        peer: the receiving worker, if the network between this worker and `peer` is slow but it is
            unknown which of the two ends is the cause; otherwise None.
        queues: whether data queues up on the way from this worker to `peer`. In this case, `own` is
            the time, in seconds, that a small message takes from this worker to `peer`, and
            `others` is the time in the opposite direction.
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

    A worker's own time is the duration of its step without the time in which it waits for other
    workers or for the network. Although the step takes equally long on all workers, the worker that
    delays the others has the longest own time. Hosts are compared by the rates at which they send.
    A host has a slow network if it sends slowly to all other hosts, or if all other hosts send
    slowly to it. If a host sends to only one other host, as in a ring or with two hosts, it is
    unknown which end is slow, and both workers are reported. If there are only two hosts, the rates
    may be equally low in both directions, because the acknowledgments of one direction queue behind
    the data of the slow direction. In this case, the slow direction is the direction in which small
    messages take longer. If both a process and a network are slow, the function returns the cause
    that adds more time to a step.

    Args:
        measured: each worker's measurement, by rank.
        factor: a worker counts as slow if its value exceeds the median of the other workers' values
            by this factor.
        hosts: the number of each worker's host; by default, each worker is on a different host.

    Example:
        >>> fast, slow = Measurement(0.1, 0.0, 0.06, 0.01), Measurement(0.1, 0.06, 0.0, 0.01)
        >>> find([fast, slow, fast], factor=1.3).cause
        <Cause.INPUT: 'input'>
    """
    return costlier(find_slow_process(measured, factor), find_slow_link(measured, factor, hosts))


def costlier(process: Straggler | None, link: Straggler | None) -> Straggler | None:
    """Returns the process or link that costs the others more time; None if both are None."""
    if process is None or link is None:
        return process or link
    return max(process, link, key=lambda found: found.cost)


def find_slow_process(measured: Sequence[Measurement], factor: float) -> Straggler | None:
    """Finds a worker with a longer own time than the others; a part of `find`."""
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
    """Finds a link that is slower than the others; a part of `find`."""
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
    # Ranks with a much lower best rate are left out. They send only small messages, and small
    # messages are slow for their size.
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
    # For each host, the ranks that send to this host more slowly than to another host.
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
    """Returns the straggler for a slow link. Its cost depends on the waits for the network."""
    cost = max(m.network for m in measured) * (1.0 - rate / usual)
    return Straggler(rank, Cause.NETWORK, rate, usual, cost, peer)


def _find_queue(
    measured: Sequence[Measurement], factor: float, one: Sequence[int], other: Sequence[int]
) -> Straggler | None:
    """Finds the direction in which data queues up between the ranks of two hosts."""
    ends = [max(ranks, key=lambda r: measured[r].delay) for ranks in (one, other)]
    back, there = sorted(ends, key=lambda r: measured[r].delay)
    delay, usual = measured[there].delay, measured[back].delay
    if (
        delay < max(_MIN_QUEUE_SECONDS, max(factor, _QUEUE_FACTOR) * usual)
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
    """Returns sentences that describe how a straggler affects the others, and where to look.

    Args:
        straggler: the straggler.
        name: a function that takes a rank and returns the name of its worker for messages.
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
    """Returns a sentence that reports that a straggler no longer delays the others."""
    keep = "keeps" if straggler.peer is None else "keep"
    return f"{subject(straggler, name)} no longer {keep} the others waiting."


def subject(straggler: Straggler, name: Callable[[int], str]) -> str:
    """Returns the subject of a message: the worker, or the connections between two workers."""
    if straggler.peer is None:
        return name(straggler.rank)
    return f"The connections from {name(straggler.rank)} to {name(straggler.peer)}"


@dataclass(frozen=True)
class Counts:
    """Counts for all connections to a rank: bytes sent to it, and messages received from it.

    Attributes:
        acknowledged_bytes: bytes sent and acknowledged.
        busy_us: the microseconds during which data was in flight.
        pending_bytes: bytes sent but not yet acknowledged.
        silent_ms: the milliseconds since the last acknowledgment if bytes are pending; otherwise 0.
        frames: status messages received from the rank.
        delay_us: the total time, in microseconds, that these messages were in flight, according to
            the clocks of both ends.
    """

    acknowledged_bytes: int = 0
    busy_us: int = 0
    pending_bytes: int = 0
    silent_ms: int = 0
    frames: int = 0
    delay_us: int = 0


def communicators(records: int = 0) -> list[dict[str, Any]]:
    """The state of all communicators of this process, each with its last `records` records."""
    if not native.has_ops():
        return []
    found: list[dict[str, Any]] = json.loads(native.load().library.tfd_state(records, 0))
    return found


def by_rank(
    communicators: Sequence[Mapping[str, Any]], ranks: Mapping[str, int]
) -> dict[int, Counts]:
    """Returns the counts for each other rank of the job, summed over all connections to this rank.

    There may be several connections to a rank, because gradients, pipeline messages, and reductions
    over several devices use separate communicators.

    Args:
        communicators: the result of the function `communicators`.
        ranks: the rank of each worker in the job, by the name of the worker in messages.
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
    """Returns the data sent to each rank between two moments, and the mean delay of its messages.

    If a communicator has been closed between the two moments, its counts are missing in `now`. If
    the counts of a rank have decreased for this reason, this rank is left out.
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
    """The first rank of the job that shares a host and a communicator with this rank."""
    found = [rank]
    for one in communicators:
        own = one["hosts"][one["rank"]]
        of_host = (n for n, host in zip(one["ranks"], one["hosts"], strict=True) if host == own)
        found += [ranks[name] for name in of_host if name in ranks]
    return min(found)
