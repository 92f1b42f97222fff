"""Who keeps the others waiting, from what each worker has measured."""

from __future__ import annotations

import itertools

import pytest

from tfdist.monitoring.stragglers import Cause, Measurement, find

IDLE = Measurement(step=0.1, input=0.002, workers=0.05, network=0.008)
SLOW = Measurement(step=0.1, input=0.002, workers=0.0, network=0.008)
STARVED = Measurement(step=0.1, input=0.06, workers=0.0, network=0.008)
EVEN = Measurement(step=0.1, input=0.01, workers=0.01, network=0.01)


def linked(best, peer, rate, network=0.05):
    return Measurement(0.1, 0.01, 0.01, network, best, peer, rate)


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
        None,
    ),
    "slow links that hardly carry anything": (
        [linked(1e9, 1, 9e8, 0.001), linked(1e7, 0, 1e7, 0.001)],
        None,
    ),
    "no links": ([EVEN, EVEN], None),
}


def test_the_straggler_and_its_cause():
    # The result does not depend on the rank.
    for (name, (measured, expected)), backwards in itertools.product(CASES.items(), (False, True)):
        if backwards:
            last = len(measured) - 1
            measured = [
                m
                if m.slowest_peer < 0
                else linked(m.best_rate, last - m.slowest_peer, m.slowest_rate, m.network)
                for m in measured[::-1]
            ]
            expected = expected and (last - expected[0], expected[1])
        found = find(measured, factor=1.3)
        assert (found and (found.rank, found.cause)) == expected, name


def test_what_is_reported():
    found = find([IDLE, STARVED, IDLE], factor=1.3)
    assert found.own == pytest.approx(0.06)
    assert found.others == pytest.approx(0.002)
    assert find([IDLE, STARVED, IDLE], factor=3.0) is None
