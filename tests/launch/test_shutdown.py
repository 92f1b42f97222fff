"""The ladder of signals: a table over time."""

from __future__ import annotations

from signal import SIGINT, SIGKILL, SIGTERM

import pytest

from tfdist.launch.job.shutdown import SignalEscalation


def climb(ladder, times):
    return [(time, number) for time in times if (number := ladder.due(time)) is not None]


@pytest.mark.parametrize(
    ("first", "sent"),
    [
        (SIGINT, [(0, SIGINT), (5, SIGTERM), (10, SIGKILL)]),
        (SIGTERM, [(0, SIGTERM), (5, SIGKILL)]),
        (SIGKILL, [(0, SIGKILL)]),
    ],
)
def test_each_step_waits_the_grace(first, sent):
    assert climb(SignalEscalation(first, grace=5.0, now=0.0), range(30)) == sent


def test_hardening_skips_the_wait():
    ladder = SignalEscalation(SIGINT, grace=5.0, now=0.0)
    assert ladder.due(0.0) == SIGINT
    ladder.harden(SIGKILL, 1.0)
    assert climb(ladder, [1.0, 6.0, 11.0]) == [(1.0, SIGKILL)]


def test_a_softer_signal_changes_nothing():
    ladder = SignalEscalation(SIGTERM, grace=5.0, now=0.0)
    assert ladder.due(0.0) == SIGTERM
    ladder.harden(SIGTERM, 1.0)
    assert climb(ladder, [1.0, 2.0, 5.0]) == [(5.0, SIGKILL)]
    ladder.harden(SIGKILL, 6.0)
    assert ladder.due(6.0) is None


def test_without_grace_everything_is_sent_at_once():
    assert climb(SignalEscalation(SIGTERM, grace=0.0, now=0.0), [0.0, 0.0]) == [
        (0.0, SIGTERM),
        (0.0, SIGKILL),
    ]


def test_exhausted_only_long_after_the_last_signal():
    ladder = SignalEscalation(SIGKILL, grace=5.0, now=0.0)
    assert not ladder.exhausted(100.0)
    assert ladder.due(100.0) == SIGKILL
    assert not ladder.exhausted(105.0)
    assert ladder.exhausted(111.0)
