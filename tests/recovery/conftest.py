"""Groups of workers for the tests of recovery."""

from __future__ import annotations

import pytest

from tests.harness.ranks import Ranks


@pytest.fixture
def start():
    """Starts groups of workers, and ends them."""
    started = []

    def start(workers, **settings):
        started.append(Ranks(workers, **settings))
        return started[-1]

    yield start
    for group in started:
        group.stop()
