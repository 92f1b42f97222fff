"""Two values that ranks pass to collectives in different orders are found, and nothing else."""

import random

import pytest

from tfdist._src.cluster.cluster_spec import Worker
from tfdist._src.cluster.session.order_checks import CollectiveInput, TracedOrders, crossing, encode
from tfdist.errors import ProgramMismatchError

WORKERS = [Worker("worker", i, f"host{i}:1") for i in range(3)]


def passed(letters):
    return [CollectiveInput(letter, f"Sum (a.py:{letter})") for letter in letters]


@pytest.mark.parametrize(
    ("one", "other", "found"),
    [
        ("ab", "ab", None),
        ("ab", "ba", (0, 0)),
        ("abc", "acb", (1, 1)),
        ("abx", "bay", (0, 0)),
        ("ab", "a", None),
        ("ab", "", None),
        ("a0", "0b", None),
        ("xay", "zza", None),
        ("xab", "bya", (1, 0)),
        # Which of them is which cannot be told.
        ("aab", "abab", None),
        ("aabb", "abab", (1, 1)),
    ],
)
def test_crossed_orders_are_found_from_both_sides(one, other, found):
    assert crossing(passed(one), passed(other)) == found
    assert crossing(passed(other), passed(one)) == (found and found[::-1])


def test_values_that_one_rank_alone_has_cause_nothing():
    generator = random.Random(0)
    for _ in range(200):
        common = generator.sample("abcdefgh", 5)
        both = []
        for others in ("stuv", "wxyz"):
            own = list(common)
            for other in generator.sample(others, 3):
                own.insert(generator.randrange(len(own) + 1), other)
            both.append(passed(own))
        assert crossing(*both) is None


def test_both_workers_and_lines_are_named():
    orders = TracedOrders(WORKERS)
    assert orders.add(0, "step (a.py:1)", encode(passed("ab"))) is None
    assert orders.add(2, "step (a.py:1), trace 2", encode(passed("ba"))) is None
    said = orders.add(1, "step (a.py:1)", encode(passed("ba")))
    assert said.startswith(
        "The workers pass values to their collectives in different orders, in step (a.py:1): "
    )
    assert f"{WORKERS[0]} passes Sum (a.py:a) where {WORKERS[1]} passes Sum (a.py:b)." in said


def test_no_more_is_kept_than_needed():
    orders = TracedOrders(WORKERS)
    for number in range(1000):
        for rank in range(3 if number % 2 else 2):
            assert orders.add(rank, f"{number}", encode(passed("ab"))) is None
    assert len(orders._told) <= 256


def test_all_sessions_fail(sessions, until):
    group = sessions(3)
    lost = []
    for session in group:
        session.on_peer_lost(lost.append)
    for session, letters in zip(group, ("ab", "ab", "ba"), strict=True):
        session.report_order("step", encode(passed(letters)))
    for session in group:
        with pytest.raises(ProgramMismatchError, match="in different orders, in step"):
            session.wait_notified("never", 1, timeout=20)
    until(lambda: len(lost) == 3)
