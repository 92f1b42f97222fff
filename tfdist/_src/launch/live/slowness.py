"""Why a running job is slow: a worker, or data on its way."""

from __future__ import annotations

from collections.abc import Sequence

from tfdist._src.launch.flight.backlogs import Backlog, longest
from tfdist._src.launch.live.ranks import Activity, Rank
from tfdist._src.monitoring.stragglers import (
    Measurement,
    Straggler,
    Traffic,
    costlier,
    find_slow_link,
    find_slow_process,
)

# More than the monitor's default: this looks at few steps, and at few messages.
_FACTOR = 1.5
_LINK_FACTOR = 3.0
_LEAST_STEPS = 4


def find_straggler(ranks: Sequence[Rank]) -> Straggler | None:
    """The rank that keeps the others waiting, by what all ranks did in the time between answers."""
    known = [one.activity for one in ranks if one.activity and one.activity.steps_per_second > 0]
    if len(known) < len(ranks):
        return None
    hosts = [n if one.leader is None else one.leader for n, one in enumerate(known)]
    measured = [_measurement(one, hosts) for one in known]
    process = None
    # A wait counts when it ends: in a few steps, one more or less decides.
    if min(one.steps_per_second * one.seconds for one in known) >= _LEAST_STEPS:
        process = find_slow_process(measured, _FACTOR)
    return costlier(process, find_slow_link(measured, _LINK_FACTOR, hosts))


def find_backlogs(ranks: Sequence[Rank], least_seconds: float) -> tuple[Backlog, ...]:
    """The data that is on its way to other hosts for long; the longest first."""
    found = longest(
        Backlog(
            sender=one.worker,
            receiver=ranks[link.rank].worker,
            bytes=link.pending_bytes,
            bytes_per_second=link.bytes_per_second or 0.0,
            silent_seconds=link.silent_seconds,
        )
        for one in ranks
        for link in (one.activity.links if one.activity else ())
        if link.pending_bytes > 0 and 0 <= link.rank < len(ranks)
    )
    return tuple(one for one in found if one.seconds >= least_seconds)


def _measurement(activity: Activity, hosts: Sequence[int]) -> Measurement:
    step = 1.0 / activity.steps_per_second
    links = {
        link.rank: Traffic(link.bytes, link.bytes / link.bytes_per_second, link.delay)
        for link in activity.links
        if link.bytes and link.bytes_per_second and 0 <= link.rank < len(hosts)
    }
    times = (step, activity.input * step, activity.workers * step, activity.network * step)
    return Measurement.with_links(*times, links, hosts)
