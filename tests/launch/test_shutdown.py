"""The escalation of signals: a table over time."""

from __future__ import annotations

from signal import SIGINT, SIGKILL, SIGTERM

import pytest

from tests.harness.tiers import exhaustive
from tfdist._src.launch.job.shutdown import Grace, SignalEscalation


def sent_by(escalation, times):
    return [(time, number) for time in times if (number := escalation.due(time)) is not None]


@pytest.mark.parametrize(
    ("first", "sent"),
    [
        (SIGINT, [(0, SIGINT), (5, SIGTERM), (10, SIGKILL)]),
        (SIGTERM, [(0, SIGTERM), (5, SIGKILL)]),
        (SIGKILL, [(0, SIGKILL)]),
    ],
)
def test_each_step_waits_the_grace(first, sent):
    assert sent_by(SignalEscalation(first, grace=5.0, now=0.0), range(30)) == sent


def test_hardening_skips_the_wait():
    escalation = SignalEscalation(SIGINT, grace=5.0, now=0.0)
    assert escalation.due(0.0) == SIGINT
    escalation.harden(SIGKILL, 1.0)
    assert sent_by(escalation, [1.0, 6.0, 11.0]) == [(1.0, SIGKILL)]


def test_a_softer_signal_changes_nothing():
    escalation = SignalEscalation(SIGTERM, grace=5.0, now=0.0)
    assert escalation.due(0.0) == SIGTERM
    escalation.harden(SIGTERM, 1.0)
    assert sent_by(escalation, [1.0, 2.0, 5.0]) == [(5.0, SIGKILL)]
    escalation.harden(SIGKILL, 6.0)
    assert escalation.due(6.0) is None


def test_without_grace_everything_is_sent_at_once():
    assert sent_by(SignalEscalation(SIGTERM, grace=0.0, now=0.0), [0.0, 0.0]) == [
        (0.0, SIGTERM),
        (0.0, SIGKILL),
    ]


def test_exhausted_only_long_after_the_last_signal():
    escalation = SignalEscalation(SIGKILL, grace=5.0, now=0.0)
    assert not escalation.exhausted(100.0)
    assert escalation.due(100.0) == SIGKILL
    assert not escalation.exhausted(105.0)
    assert escalation.exhausted(111.0)


@exhaustive
def test_the_grace_is_longer_for_saving_unless_it_is_given():
    assert Grace.given(None) == Grace(failure=5.0, preemption=25.0)
    assert Grace.given(0.5) == Grace(failure=0.5, preemption=0.5)
