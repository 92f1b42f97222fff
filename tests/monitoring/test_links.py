"""What the kernel counts of the connections to other hosts, of several communicators."""

from __future__ import annotations

import pytest

from tests.harness.groups import GROUPS
from tests.harness.tiers import exhaustive
from tfdist._src.monitoring.stragglers import (
    Cause,
    Counts,
    Measurement,
    Traffic,
    by_rank,
    find,
    leader,
    traffic,
)

pytestmark = exhaustive
RANKS = {f"worker {n}": n for n in range(4)}


def communicator(own, ranks, hosts, links):
    """One whose links are: rank, acknowledged bytes, busy microseconds, pending bytes, silence."""
    keys = ("rank", "acknowledged_bytes", "busy_us", "pending_bytes", "silent_ms")
    return {
        "rank": own,
        "ranks": [f"worker {n}" for n in ranks],
        "hosts": hosts,
        "links": [dict(zip(keys, link, strict=True)) for link in links],
        "peers": [{"rank": r, "frames": r, "delay_us": 10 * r} for r in range(len(ranks))],
    }


# Of rank 1, whose host rank 0 shares.
STATE = [
    communicator(1, [0, 1, 2, 3], [0, 0, 1, 2], [(2, 10, 1, 0, 7), (3, 20, 2, 5, 50)]),
    communicator(0, [1, 3], [0, 1], [(1, 400, 40, 6, 60)]),
]


def test_the_counts_of_all_communicators_are_added_up_by_the_jobs_rank():
    expected = {2: Counts(10, 1, 0, 0, 2, 20), 3: Counts(420, 42, 11, 60, 4, 40)}
    assert by_rank(STATE, RANKS) == expected
    assert by_rank(STATE, {"worker 2": 2}) == {2: expected[2]}
    assert leader(STATE, RANKS, 1) == 0
    assert leader(STATE[1:], RANKS, 1) == 1


def test_what_is_sent_between_two_moments():
    before = {1: Counts(10, 1_000_000, frames=5, delay_us=1_000), 2: Counts(50, 1_000_000)}
    now = {
        1: Counts(30, 1_500_000, frames=9, delay_us=9_000),
        2: Counts(20, 1_200_000),
        3: Counts(7, 250_000),
    }
    assert traffic(before, now) == {1: Traffic(20, 0.5, 0.002), 3: Traffic(7, 0.25)}


def test_a_slow_link_of_any_communicator_is_found():
    # All three send to each other over one communicator, and rank 1 sends to rank 2, slowly, over
    # another one: what crosses it is the most.
    def measured(rank, communicators):
        links = traffic({}, by_rank(communicators, RANKS))
        return Measurement.with_links(0.1, 0.01, 0.01, 0.05, links, [0, 1, 2])

    def of(own, *channels):
        all_to_all = [(other, 1_000_000, 2_000, 0, 0) for other in range(3) if other != own]
        return [communicator(own, [0, 1, 2], [0, 1, 2], all_to_all), *channels]

    channel = communicator(0, [1, 2], [0, 1], [(1, 9_000_000, 1_000_000, 0, 0)])
    group = [of(0), of(1, channel), of(2)]
    found = find([measured(rank, one) for rank, one in enumerate(group)], factor=1.3)
    assert found is not None
    assert (found.rank, found.cause, found.peer) == (1, Cause.NETWORK, 2)
    assert find([measured(rank, of(rank)) for rank in range(3)], factor=1.3) is None


@pytest.mark.parametrize(("group", "kind"), [("2 hosts", "1f1b"), ("2x2 on 2 hosts", "fit")])
def test_the_monitor_counts_what_crosses_any_communicator(group, kind):
    for in_all, in_one in GROUPS[group].run("tests.callbacks.observing:links_counted", kind):
        assert in_all > 2 * in_one > 0
