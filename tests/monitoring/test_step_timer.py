"""Which steps count, with a clock of the test's."""

from __future__ import annotations

import pytest

from tfdist._src.monitoring import training
from tfdist._src.monitoring.training import StepTimer


@pytest.fixture
def clock(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(training.time, "perf_counter", lambda: now[0])
    return now


def run(timer, clock, batch, seconds, between=0.0):
    clock[0] += between
    timer.begin_batch()
    clock[0] += seconds
    timer.end_batch(batch)


def test_which_steps_count(clock):
    timer = StepTimer()
    timer.begin_training()
    assert timer.figures() is None
    run(timer, clock, 0, 60.0)  # traced
    assert timer.figures().seconds == 60  # There is no other.
    run(timer, clock, 1, 1.0, between=0.5)  # What callbacks do in between counts.
    run(timer, clock, 4, 3.0)  # three steps in one call
    figures = timer.figures()
    assert (figures.steps, figures.seconds, figures.times) == (4, 4.5, (1.5, 1.0))
    assert figures.quantile(0.5) == 1.25
    assert figures.share(0.9) == pytest.approx(0.2)
    timer.restart()
    run(timer, clock, 5, 2.0)
    assert timer.figures().times == (2.0,)
    timer.begin_epoch()
    run(timer, clock, 0, 2.0, between=100.0)  # What lies between epochs does not count.
    assert timer.figures().seconds == 2
