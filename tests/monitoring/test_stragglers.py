"""Who keeps the others waiting, from what each worker has measured."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from tests.harness.tiers import exhaustive
from tfdist._src.monitoring.stragglers import (
    Cause,
    Measurement,
    Straggler,
    Traffic,
    describe,
    describe_end,
    find,
)

IDLE = Measurement(step=0.1, input=0.002, workers=0.05, network=0.008)
SLOW = Measurement(step=0.1, input=0.002, workers=0.0, network=0.008)
STARVED = Measurement(step=0.1, input=0.06, workers=0.0, network=0.008)
EVEN = Measurement(step=0.1, input=0.01, workers=0.01, network=0.01)


def linked(best, peer, rate, network=0.05, hosts=2):
    """A worker that sends to so many hosts: fastest at one rate, and slowest to the peer."""
    return Measurement(0.1, 0.01, 0.01, network, best, peer, rate, hosts)


def to_one(peer, rate):
    """A worker that sends to one host only."""
    return linked(rate, peer, rate, hosts=1)


def queued(peer, rate, delay):
    """The same, where small messages from there take so long."""
    return replace(to_one(peer, rate), delay=delay)


CASES = {
    "nobody": ([EVEN] * 3, None),
    "one worker": ([SLOW], None),
    "compute": ([IDLE, SLOW, IDLE], (1, Cause.COMPUTE)),
    "compute of two": ([SLOW, IDLE], (0, Cause.COMPUTE)),
    "input": ([IDLE, IDLE, IDLE, STARVED], (3, Cause.INPUT)),
    # Half of the workers slow is no straggler: the median is slow, too.
    "most are slow": ([SLOW, SLOW, IDLE], None),
    # 1 ms of a step of 100 ms, though it is more than all others take.
    "too little": (
        [Measurement(0.1, 0.0, 0.098, 0.0), Measurement(0.1, 0.001, 0.096, 0.0)],
        None,
    ),
    "all that it sends": (
        [linked(1e9, 1, 9e8), linked(1e7, 0, 1e7), linked(1e9, 1, 9e8)],
        (1, Cause.NETWORK),
    ),
    "all that it receives": (
        [linked(1e9, 2, 1e7), linked(1e9, 2, 1e7), linked(1e9, 0, 9e8)],
        (2, Cause.NETWORK),
    ),
    "one link between two others": (
        [linked(1e9, 1, 1e7), linked(1e9, 0, 9e8), linked(1e9, 0, 9e8)],
        (0, Cause.NETWORK, 1),
    ),
    # As it may be by chance.
    "one link that is somewhat slow": (
        [linked(1e9, 1, 3e8), linked(1e9, 0, 9e8), linked(1e9, 0, 9e8)],
        None,
    ),
    "slow links that hardly carry anything": (
        [linked(1e9, 1, 9e8, 0.001), linked(1e7, 0, 1e7, 0.001)],
        None,
    ),
    # What one of them sends slowly, the other one receives slowly: either may be the reason.
    "two hosts": ([to_one(1, 1e7), to_one(0, 1e9)], (0, Cause.NETWORK, 1)),
    "two hosts, equally slow": ([to_one(1, 1e7), to_one(0, 1e7)], None),
    # Acknowledgments wait behind the data from 0 to 1, and by chance even longer than that.
    "a queue between two hosts": (
        [queued(1, 1.2e7, 0.001), queued(0, 1e7, 0.04)],
        (0, Cause.NETWORK, 1),
    ),
    "messages that are read late": (
        [replace(queued(1, 1e7, 0.0), step=0.02), replace(queued(0, 1e7, 0.004), step=0.02)],
        None,
    ),
    "queues both ways": ([queued(1, 1e7, 0.04), queued(0, 1e7, 0.05)], None),
    "late on both hosts": ([queued(1, 1e7, 0.02), queued(0, 1e7, 0.035)], None),
    "a queue of 8 ms in 200 ms": (
        [replace(queued(1, 1e7, 0.0), step=0.2), replace(queued(0, 1e7, 0.008), step=0.2)],
        None,
    ),
    "a ring": ([to_one(1, 1e9), to_one(2, 1e7), to_one(0, 1e9)], (1, Cause.NETWORK, 2)),
    "a pipeline": ([to_one(1, 1e9), linked(1e9, 2, 1e7), to_one(1, 1e9)], (1, Cause.NETWORK, 2)),
    # The slow network costs 50 ms of a step, the slow worker 15.
    "a slow network, and a worker that computes for longer": (
        [replace(to_one(1, 1e7), workers=0.025), to_one(0, 1e9)],
        (0, Cause.NETWORK, 1),
    ),
    "a slow worker, and a network that is somewhat slow": (
        [
            replace(to_one(1, 1e7), workers=0.04, network=0.02),
            replace(to_one(0, 1e9), workers=0.0, network=0.02),
        ],
        (1, Cause.COMPUTE),
    ),
    "no links": ([EVEN, EVEN], None),
}
FROM_0_TO_2 = (0, Cause.NETWORK, 2)
# Of two workers each: the measurements, and what is found.
HOSTS_OF_TWO = {
    "two hosts": ([to_one(2, 1e7), to_one(3, 9e6), to_one(0, 1e9), to_one(1, 1e9)], FROM_0_TO_2),
    "small messages, and the gradients": (
        [to_one(2, 1e9), to_one(2, 1e6), to_one(0, 1e9), to_one(0, 1e6)],
        None,
    ),
    "two hosts with a queue": (
        [queued(2, 1e7, 0.0), queued(3, 1e7, 0.001), queued(0, 1e7, 0.02), queued(1, 1e7, 0.03)],
        (1, Cause.NETWORK, 3),
    ),
    "two hosts with leaders": (
        [to_one(2, 1e7), to_one(2, 1e6), to_one(0, 1e9), to_one(0, 1e6)],
        FROM_0_TO_2,
    ),
    "three hosts, all that one sends": (
        [linked(1e7, 2, 1e7), linked(9e6, 3, 9e6), *[linked(1e9, 0, 9e8)] * 4],
        (0, Cause.NETWORK, None),
    ),
    "three hosts, all that one receives": (
        [*[linked(1e9, 4, 1e7)] * 2, *[linked(1e9, 5, 1e7)] * 2, *[linked(1e9, 0, 9e8)] * 2],
        (4, Cause.NETWORK, None),
    ),
}


def found_in(measured, hosts=()):
    found = find(measured, 1.3, hosts)
    return found and (found.rank, found.cause, found.peer)


def test_the_straggler_and_its_cause():
    # The result does not depend on the rank.
    for (name, (measured, expected)), backwards in itertools.product(CASES.items(), (False, True)):
        wanted = expected and (*expected, None)[:3]
        if backwards:
            last = len(measured) - 1
            measured = [
                m if m.slowest_peer < 0 else replace(m, slowest_peer=last - m.slowest_peer)
                for m in measured[::-1]
            ]
            if wanted:
                rank, cause, peer = wanted
                wanted = (last - rank, cause, None if peer is None else last - peer)
        assert found_in(measured) == wanted, name
    for name, (measured, expected) in HOSTS_OF_TWO.items():
        assert found_in(measured, [n // 2 for n in range(len(measured))]) == expected, name


@exhaustive
def test_what_is_measured_of_links():
    fast, slow, small = Traffic(9e6, 0.01), Traffic(9e6, 0.1), Traffic(9e4, 0.1)

    def of(links, hosts=(0, 1, 2, 2)):
        found = Measurement.with_links(0.1, 0.0, 0.0, 0.05, links, hosts)
        return found.best_rate, found.slowest_peer, found.slowest_rate, found.hosts

    assert of({}) == (0.0, -1, 0.0, 0)
    assert of({1: Traffic(9.0, 1e-9)}) == (0.0, -1, 0.0, 0)
    assert of({1: fast, 2: slow}) == (9e8, 2, 9e7, 2)
    # To a host as fast as the fastest link there; and only what carries most of it counts.
    assert of({1: fast, 2: slow, 3: fast}) == (9e8, 1, 9e8, 2)
    assert of({1: fast, 2: small}) == (9e8, 1, 9e8, 1)
    late = {1: fast, 2: replace(fast, delay=0.02), 3: replace(small, delay=0.01)}
    assert Measurement.with_links(0.1, 0.0, 0.0, 0.05, late, (0, 1, 2, 2)).delay == 0.02


def test_what_is_reported():
    found = find([IDLE, STARVED, IDLE], factor=1.3)
    assert found.own == pytest.approx(0.06)
    assert found.others == pytest.approx(0.002)
    assert find([IDLE, STARVED, IDLE], factor=3.0) is None
    between = Straggler(0, Cause.NETWORK, 1e7, 1e9, 0.05, peer=2)
    assert describe(between, "rank {}".format) == (
        "The connections from rank 0 to rank 2 keep the others waiting: they carry 10 MB/s while "
        "they send, where the median of the others is 1e+03 MB/s. Look at the network between them."
    )
    queue = Straggler(0, Cause.NETWORK, 0.04, 0.001, 0.05, peer=2, queues=True)
    assert describe(queue, "rank {}".format) == (
        "The connections from rank 0 to rank 2 keep the others waiting: data queues there, and "
        "small messages take 40.0 ms, but 1.0 ms the other way. Look at the network between them."
    )
    end = "The connections from rank 0 to rank 2 no longer keep the others waiting."
    assert describe_end(between, "rank {}".format) == end
