"""Ends the warm groups of workers."""

import pytest

from tests.pipeline.groups import GROUPS


@pytest.fixture(scope="session", autouse=True)
def _stop_groups():
    yield
    for group in GROUPS.values():
        group.stop()
