"""A model that is gone leaves nothing behind."""

import pytest

from tests.harness.groups import GROUPS
from tests.harness.tiers import exhaustive, some


@pytest.mark.parametrize(
    ("group", "staged"), some([("2", False), ("2x2", False), ("4", True)], always=[])
)
def test_no_graph_is_left(group, staged):
    left = GROUPS[group].run("tests.strategy.training_twice:graphs_left", staged)
    assert not any(left), left


@exhaustive
def test_a_strategy_that_is_gone_leaves_no_compressor():
    left = GROUPS["2"].run("tests.strategy.training_twice:compressors_left")
    assert max(left) <= 2, left
