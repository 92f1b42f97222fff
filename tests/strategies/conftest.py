"""Ends the warm groups of workers."""

import pytest

from tests.strategies.comparison import GROUPS


@pytest.fixture(scope="session", autouse=True)
def _stop_groups():
    yield
    for group in GROUPS.values():
        group.stop()
