"""The logger counts what crosses hosts, and nothing where nothing does."""

from __future__ import annotations

import pytest

from tests.harness.groups import GROUPS
from tests.harness.tiers import exhaustive

LOGGED = "tests.callbacks.behaviours:logged"


def test_what_is_sent_is_received():
    (sent, received, parameters), (sent_too, received_too, _) = GROUPS["2 hosts"].run(LOGGED)
    assert sent == received_too and sent_too == received
    for bytes_ in sent:
        # Ten steps, each with all gradients and a little more.
        assert bytes_ >= 10 * 4 * parameters


@exhaustive
@pytest.mark.parametrize("group", ["1", "2", "2 by TensorFlow"])
def test_nothing_is_counted_where_nothing_crosses(group):
    for sent, received, _ in GROUPS[group].run(LOGGED):
        assert sent == received == [0, 0, 0]
